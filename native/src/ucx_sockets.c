/* The library's TCP connections within one host: not paced. Progress thread only.
 *
 * Congestion control shares a network; between two ends of one host there is none. The kernel's BBR
 * took a loopback connection that had rested for a slow one, and paced the first 2 MiB of each read to a
 * segment of 64 KiB in 41 us, 1.6 GB/s (docs/decisions/0003-ucx.md, finding 25). Reno, which is in every
 * kernel and allowed to everybody, paces nothing. What leaves the host keeps the system's choice.
 *
 * libucp has no setting for this and names no socket, but the kernel says which descriptors its epoll
 * sets hold: the worker's holds those of its interfaces, which hold their connections. So no socket but
 * the library's is ever touched. Where /proc is not there, nothing is done.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "ucx_engine.h"

/* Epoll sets within epoll sets that are looked into: the worker's, its interfaces'. */
enum { DEPTH_MAX = 2 };

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

static void unpace_all_of(int epoll_fd, int depth);

static void look_at(int fd, int depth)
{
    static const char CONTROL[] = "reno";
    if (stays_here(fd)) {
        /* Whatever the kernel says to it: the connection works either way. */
        (void)setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, CONTROL, sizeof(CONTROL) - 1);
    } else if (depth < DEPTH_MAX) {
        unpace_all_of(fd, depth + 1);
    }
}

/* A line "tfd: N ..." for each descriptor of the set, in the lines of its fdinfo. */
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
            if (strncmp(line, "tfd:", 4) == 0) {
                look_at(atoi(line + 4), depth);
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
