/* The library's TCP connections within one host: not paced. Progress thread only.
 *
 * Congestion control shares a network; between two ends of one host there is none. The kernel's BBR
 * took a loopback connection that had rested for a slow one, and paced the first 2 MiB of each read to a
 * segment of 64 KiB in 41 us, 1.6 GB/s (docs/decisions/0003-ucx.md, finding 25). Reno, which is in every
 * kernel and allowed to everybody, paces nothing. What leaves the host keeps the system's choice.
 *
 * libucp has no setting for this and names no socket, but the kernel says which descriptors its epoll
 * sets hold: the worker's holds those of its interfaces, which hold their connections. The sets live as
 * long as the worker; a connection may be closed by another of libucp's threads, and its number be
 * anybody's, before it is looked at. So a set's line names an inode, too, and what is changed is a
 * duplicate of the descriptor that was found to be it: no socket but the library's is ever touched.
 * (Nobody waits at the sets meanwhile: this thread does. So no event comes of what lives a moment
 * longer.) Where the kernel does not say all that, nothing is done.
 */
#define _GNU_SOURCE /* F_DUPFD_CLOEXEC */
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ucx_engine.h"

/* Epoll sets within epoll sets that are looked into: the worker's, its interfaces'. */
enum { DEPTH_MAX = 2 };
static const char UNPACED[] = "reno";

/* Whether a connection is between two ends of one address: of this host. */
static bool stays_here(int fd)
{
    struct sockaddr_storage here, there;
    socklen_t here_size = sizeof(here), there_size = sizeof(there);
    if (getsockname(fd, (struct sockaddr *)&here, &here_size) != 0 ||
        getpeername(fd, (struct sockaddr *)&there, &there_size) != 0 ||
        here.ss_family != there.ss_family) {
        return false;
    }
    if (here.ss_family == AF_INET6) {
        return memcmp(&((const struct sockaddr_in6 *)&here)->sin6_addr,
                      &((const struct sockaddr_in6 *)&there)->sin6_addr,
                      sizeof(struct in6_addr)) == 0;
    }
    return here.ss_family == AF_INET && ((const struct sockaddr_in *)&here)->sin_addr.s_addr ==
                                            ((const struct sockaddr_in *)&there)->sin_addr.s_addr;
}

/* Whether a connection is paced, or may be, for nothing. */
static bool is_paced(int fd)
{
    char control[16] = "";
    socklen_t size = sizeof(control) - 1;
    return stays_here(fd) &&
           getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, control, &size) == 0 &&
           strcmp(control, UNPACED) != 0;
}

static bool is_inode(int fd, unsigned long inode, mode_t *mode)
{
    struct stat found;
    bool is = fstat(fd, &found) == 0 && found.st_ino == inode;
    *mode = is ? found.st_mode : 0;
    return is;
}

static void unpace_all_of(int epoll_fd, int depth);

/* Look at a descriptor that a set holds as `inode`. */
static void look_at(int fd, unsigned long inode, int depth)
{
    mode_t mode;
    if (!is_inode(fd, inode, &mode)) {
        return;
    }
    if (!S_ISSOCK(mode)) {
        if (depth < DEPTH_MAX) {
            unpace_all_of(fd, depth + 1);
        }
        return;
    }
    if (!is_paced(fd)) {
        return; /* most of them: a look costs 3 us for each that there is */
    }
    int held = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (held >= 0) {
        if (is_inode(held, inode, &mode) && is_paced(held)) {
            /* Whatever the kernel says to it: the connection works either way. */
            (void)setsockopt(held, IPPROTO_TCP, TCP_CONGESTION, UNPACED, sizeof(UNPACED) - 1);
        }
        close(held);
    }
}

/* A line "tfd: N ... ino:X ..." for each descriptor of the set, in the lines of its fdinfo. */
static void unpace_all_of(int epoll_fd, int depth)
{
    char path[64], text[4096];
    snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", epoll_fd);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    size_t held = 0;
    ssize_t got;
    while (fd >= 0 && (got = read(fd, text + held, sizeof(text) - 1 - held)) > 0) {
        held += (size_t)got;
        text[held] = '\0';
        char *line = text, *end;
        while ((end = strchr(line, '\n')) != NULL) {
            int number;
            unsigned long inode;
            *end = '\0';
            if (sscanf(line, "tfd: %d events: %*x data: %*x pos:%*d ino:%lx", &number, &inode) == 2) {
                look_at(number, inode, depth);
            }
            line = end + 1;
        }
        held -= (size_t)(line - text);
        memmove(text, line, held);
    }
    if (fd >= 0) {
        close(fd);
    }
}

void kvp_sockets_unpace(const kvp_ucp *ucp, ucx_worker *worker)
{
    int worker_fd;
    if (ucp->worker_get_efd(worker, &worker_fd) == UCX_OK) {
        unpace_all_of(worker_fd, 0);
    }
}
