/* Strangers: connections to the listener that say something else than UCX. Progress thread only.
 *
 * libucp reads what a connection says first into a buffer of about 2 KiB. When that is full and no
 * message of its own, it asks the socket for 0 more bytes, for ever, and one of its threads spins:
 * docs/decisions/0003-ucx.md, finding 10. Of one that says less and stays it never tells us anything,
 * and it keeps a descriptor for ever. So every `look_ns` this looks at the sockets that were accepted
 * at the listener. A stranger is one with something to read that nobody has read since the last look,
 * and one that has become no endpoint since then: it is reset, which libucp takes for the peer's doing
 * and gives everything back. An endpoint that was accepted is known by its peer's address; while that
 * of one is not known, nobody is reset for being no endpoint.
 *
 * Every step is done on a duplicate of the descriptor that was looked at first, so whatever libucp
 * closes or opens meanwhile, no socket but one of the listener's is ever touched.
 */
#define _GNU_SOURCE /* POLLRDHUP, F_DUPFD_CLOEXEC */
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ucx_engine.h"

/* What getdents64 answers, from its manual page: glibc's readdir would allocate. */
typedef struct {
    uint64_t inode;
    int64_t next;
    uint16_t size;
    uint8_t type;
    char name[];
} kvp_dirent;

static bool same_address(const struct sockaddr_storage *a, const struct sockaddr_storage *b)
{
    if (a->ss_family == AF_INET6) {
        return memcmp(&((const struct sockaddr_in6 *)a)->sin6_addr,
                      &((const struct sockaddr_in6 *)b)->sin6_addr, sizeof(struct in6_addr)) == 0;
    }
    in_addr_t wanted = ((const struct sockaddr_in *)b)->sin_addr.s_addr;
    return wanted == INADDR_ANY || ((const struct sockaddr_in *)a)->sin_addr.s_addr == wanted;
}

/* Whether a descriptor is a connection that was accepted at our listener. */
static bool is_accepted(const kvp_ucx *engine, int fd)
{
    struct sockaddr_storage here;
    socklen_t size = sizeof(here);
    if (getsockname(fd, (struct sockaddr *)&here, &size) != 0 ||
        here.ss_family != engine->host.ss_family ||
        /* sin_port and sin6_port lie at the same offset. */
        ntohs(((const struct sockaddr_in *)&here)->sin_port) != engine->listen_port ||
        !same_address(&here, &engine->host)) {
        return false;
    }
    int type = 0, listens = 1;
    size = sizeof(type);
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) != 0 || type != SOCK_STREAM) {
        return false;
    }
    size = sizeof(listens);
    return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 && listens == 0;
}

/* Describe a socket; `waits` is set if it has something to read, or an end, that nobody has read. */
static bool describe(int fd, kvp_stranger *out)
{
    struct pollfd asked = {.fd = fd, .events = POLLIN | POLLRDHUP};
    socklen_t size = sizeof(out->cookie);
    out->waits = poll(&asked, 1, 0) == 1;
    return ioctl(fd, FIONREAD, &out->unread) == 0 &&
           getsockopt(fd, SOL_SOCKET, SO_COOKIE, &out->cookie, &size) == 0;
}

/* Learn who the accepted endpoints are. Returns false if that of one is not known. */
static bool learn_endpoints(kvp_ucx *engine)
{
    bool all = true;
    for (size_t i = 0; i < engine->live_count; i++) {
        kvp_endpoint *endpoint = engine->live[i];
        if (!endpoint->accepted || endpoint->remote_address.ss_family != AF_UNSPEC) {
            continue;
        }
        ucx_ep_attr attr = {.field_mask = UCX_EP_ATTR_REMOTE};
        if (endpoint->ep != NULL && engine->ucp->ep_query(endpoint->ep, &attr) == UCX_OK) {
            endpoint->remote_address = attr.remote;
        }
        all = all && endpoint->remote_address.ss_family != AF_UNSPEC;
    }
    return all;
}

static bool is_endpoint(const kvp_ucx *engine, int fd)
{
    struct sockaddr_storage there;
    socklen_t size = sizeof(there);
    if (getpeername(fd, (struct sockaddr *)&there, &size) != 0) {
        return true; /* it has no peer any more: libucp will see to it */
    }
    in_port_t port = ((const struct sockaddr_in *)&there)->sin_port;
    for (size_t i = 0; i < engine->live_count; i++) {
        const struct sockaddr_storage *known = &engine->live[i]->remote_address;
        if (known->ss_family == there.ss_family &&
            ((const struct sockaddr_in *)known)->sin_port == port && same_address(&there, known)) {
            return true;
        }
    }
    return false;
}

/* Whether the last look found it as it is: no endpoint, or with the same bytes unread. */
static bool was_seen(const kvp_ucx *engine, const kvp_stranger *stranger, bool endpoint)
{
    for (size_t i = 0; i < engine->stranger_count; i++) {
        const kvp_stranger *seen = &engine->strangers[i];
        if (seen->cookie == stranger->cookie) {
            return !endpoint || (seen->waits && seen->unread == stranger->unread);
        }
    }
    return false;
}

/* Returns whether `found` is a suspect: to be looked at again. `full`: there is no room to remember it. */
static bool look_at(kvp_ucx *engine, int fd, bool all_known, bool full, kvp_stranger *found)
{
    if (!is_accepted(engine, fd)) {
        return false;
    }
    int held = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (held < 0) {
        return false;
    }
    bool endpoint = !all_known || is_endpoint(engine, held);
    bool suspect = is_accepted(engine, held) && describe(held, found) &&
                   (!endpoint || found->waits);
    if (suspect && (was_seen(engine, found, endpoint) || (full && !endpoint))) {
        const struct sockaddr nowhere = {.sa_family = AF_UNSPEC};
        if (connect(held, &nowhere, sizeof(nowhere)) == 0) {
            atomic_fetch_add_explicit(&engine->strangers_reset, 1, memory_order_relaxed);
        }
        suspect = false;
    }
    close(held);
    return suspect;
}

void kvp_strangers_look(kvp_ucx *engine)
{
    if (engine->listener == NULL) {
        return;
    }
    if (engine->now_ns >= engine->look_ns) {
        engine->look_ns = engine->now_ns + engine->config.look_ns;
        kvp_stranger suspects[KVP_STRANGERS_MAX], found;
        size_t count = 0;
        bool all_known = learn_endpoints(engine);
        int folder = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        char list[4096] __attribute__((aligned(8)));
        long size = 0;
        while (folder >= 0 &&
               (size = syscall(SYS_getdents64, folder, list, sizeof(list))) > 0) {
            for (long at = 0; at < size; at += ((const kvp_dirent *)(list + at))->size) {
                const char *name = ((const kvp_dirent *)(list + at))->name;
                bool full = count == KVP_STRANGERS_MAX;
                if (name[0] != '.' && look_at(engine, atoi(name), all_known, full, &found) &&
                    !full) {
                    suspects[count++] = found;
                }
            }
        }
        if (folder >= 0) {
            close(folder);
        }
        memcpy(engine->strangers, suspects, count * sizeof(suspects[0]));
        engine->stranger_count = count;
    }
    if (engine->look_ns < engine->due_ns) {
        engine->due_ns = engine->look_ns;
    }
}
