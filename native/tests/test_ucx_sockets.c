/* ucx_sockets.c: which sockets it touches, and how often it looks. Real sockets and epoll sets; what it
 * asks of the kernel is asked, and noted. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "check.h"

enum { NEAR = 300, FAR = 100, TOUCHED_MAX = 4 * NEAR };

/* The inodes of sockets that were set in this look, and in any; how often a file was opened in this. */
static ino_t touched[TOUCHED_MAX], ever[TOUCHED_MAX];
static size_t touched_count, ever_count, opened_count;

static ino_t inode_of(int fd)
{
    struct stat found;
    CHECK(fstat(fd, &found) == 0);
    return found.st_ino;
}

static int noted_setsockopt(int fd, int level, int name, const void *value, socklen_t size)
{
    CHECK(touched_count < TOUCHED_MAX);
    CHECK(ever_count < TOUCHED_MAX);
    touched[touched_count++] = ever[ever_count++] = inode_of(fd);
    return setsockopt(fd, level, name, value, size);
}

/* Every socket starts as if the system's choice were none of these, whatever it is. */
static int system_getsockopt(int fd, int level, int name, void *value, socklen_t *size)
{
    CHECK(level == IPPROTO_TCP && name == TCP_CONGESTION);
    CHECK(getsockopt(fd, level, name, value, size) == 0);
    for (size_t i = 0; i < ever_count; i++)
        if (ever[i] == inode_of(fd))
            return 0;
    memcpy(value, "other", 6);
    return 0;
}

static int noted_open(const char *path, int flags)
{
    opened_count++;
    return open(path, flags);
}

#define setsockopt noted_setsockopt
#define getsockopt system_getsockopt
#define open noted_open
#include "../src/ucx_sockets.c"
#undef setsockopt
#undef getsockopt
#undef open

#include <arpa/inet.h>
#include <sys/epoll.h>
#include <sys/resource.h>

static int worker_fd;

static ucx_status get_efd(ucx_worker *worker, int *fd)
{
    (void)worker;
    *fd = worker_fd;
    return UCX_OK;
}

static void look(void)
{
    const kvp_ucp ucp = {.worker_get_efd = get_efd};
    touched_count = opened_count = 0;
    kvp_sockets_unpace(&ucp, NULL);
}

static size_t times_touched(int fd)
{
    size_t times = 0;
    for (size_t i = 0; i < touched_count; i++)
        times += touched[i] == inode_of(fd);
    return times;
}

static int control_is_reno(int fd)
{
    char control[16] = "";
    socklen_t size = sizeof(control);
    CHECK(getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, control, &size) == 0);
    return strcmp(control, "reno") == 0;
}

/* Connect from `from` to a listener at 127.0.0.1. */
static void connect_pair(const char *from, int pair[2])
{
    static int listener = -1;
    static struct sockaddr_in here = {.sin_family = AF_INET};
    struct sockaddr_in mine = {.sin_family = AF_INET};
    socklen_t size = sizeof(here);
    if (listener < 0) {
        here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        listener = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(listener >= 0 && bind(listener, (const struct sockaddr *)&here, size) == 0);
        CHECK(listen(listener, 8) == 0);
        CHECK(getsockname(listener, (struct sockaddr *)&here, &size) == 0);
    }
    mine.sin_addr.s_addr = inet_addr(from);
    pair[0] = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(pair[0] >= 0 && bind(pair[0], (const struct sockaddr *)&mine, sizeof(mine)) == 0);
    CHECK(connect(pair[0], (const struct sockaddr *)&here, sizeof(here)) == 0);
    pair[1] = accept(listener, NULL, NULL);
    CHECK(pair[1] >= 0);
}

static int set_within(int outer)
{
    struct epoll_event event = {.events = EPOLLIN};
    int made = epoll_create1(EPOLL_CLOEXEC);
    CHECK(made >= 0 && (outer < 0 || epoll_ctl(outer, EPOLL_CTL_ADD, made, &event) == 0));
    return made;
}

static void add(int set, int fd)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.u64 = UINT64_MAX};
    CHECK(epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0);
}

static size_t count_open(void)
{
    size_t count = 0;
    for (int fd = 0; fd < 4096; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

/* Hundreds, so that lines lie across reads; each end of a host's own once, and nothing else. */
static void test_those_of_the_sets(void)
{
    static int near[NEAR][2], far[FAR][2];
    int others[2], deep[2];
    worker_fd = set_within(-1);
    int first = set_within(worker_fd), second = set_within(worker_fd), third = set_within(second);
    int fourth = set_within(third);
    for (size_t i = 0; i < NEAR; i++) {
        connect_pair("127.0.0.1", near[i]);
        add(i % 2 ? first : third, near[i][i % 2]);
    }
    for (size_t i = 0; i < FAR; i++) {
        connect_pair("127.0.0.2", far[i]);
        add(first, far[i][0]);
    }
    connect_pair("127.0.0.1", others);
    connect_pair("127.0.0.1", deep);
    add(fourth, deep[0]); /* deeper than libucp's lie */
    size_t before = count_open();
    look();
    CHECK(count_open() == before);
    CHECK(touched_count == NEAR && opened_count == 4); /* a look at a set each, none at a socket */
    for (size_t i = 0; i < NEAR; i++) {
        CHECK(times_touched(near[i][i % 2]) == 1 && control_is_reno(near[i][i % 2]));
        CHECK(times_touched(near[i][1 - i % 2]) == 0);
    }
    CHECK(times_touched(others[0]) == 0 && times_touched(deep[0]) == 0);
    look();
    CHECK(touched_count == 0); /* what is done is done */
    for (size_t i = 0; i < NEAR; i++)
        close(near[i][0]), close(near[i][1]);
    for (size_t i = 0; i < FAR; i++)
        close(far[i][0]), close(far[i][1]);
    close(others[0]), close(others[1]), close(deep[0]), close(deep[1]);
    close(fourth), close(third), close(second), close(first), close(worker_fd);
}

/* A set goes on naming a number whose socket lives elsewhere, as it does between a look and a step. */
static void test_a_number_that_is_anothers(void)
{
    int mine[2], others[2];
    worker_fd = set_within(-1);
    int set = set_within(worker_fd);
    connect_pair("127.0.0.1", mine);
    connect_pair("127.0.0.1", others);
    add(set, mine[0]);
    int kept = dup(mine[0]);
    CHECK(kept >= 0 && dup2(others[0], mine[0]) == mine[0]);
    look();
    CHECK(touched_count == 0);
    close(kept); /* nobody has it now, and the set lets go of it */
    add(set, others[1]);
    look();
    CHECK(touched_count == 1 && times_touched(others[1]) == 1);
    close(mine[0]), close(mine[1]), close(others[0]), close(others[1]);
    close(set), close(worker_fd);
}

static void test_an_address_of_both_versions(void)
{
    struct sockaddr_in6 here = {.sin6_family = AF_INET6};
    socklen_t size = sizeof(here);
    int listener = socket(AF_INET6, SOCK_STREAM, 0);
    if (listener < 0)
        return; /* a kernel without IPv6 has none */
    CHECK(inet_pton(AF_INET6, "::ffff:127.0.0.1", &here.sin6_addr) == 1);
    CHECK(bind(listener, (const struct sockaddr *)&here, size) == 0 && listen(listener, 1) == 0);
    CHECK(getsockname(listener, (struct sockaddr *)&here, &size) == 0);
    int client = socket(AF_INET6, SOCK_STREAM, 0);
    CHECK(connect(client, (const struct sockaddr *)&here, size) == 0);
    worker_fd = set_within(-1);
    add(worker_fd, client);
    add(worker_fd, listener); /* connected to nobody */
    look();
    CHECK(touched_count == 1 && control_is_reno(client));
    close(client), close(listener), close(worker_fd);
}

int main(void)
{
    struct rlimit files;
    CHECK(getrlimit(RLIMIT_NOFILE, &files) == 0);
    files.rlim_cur = files.rlim_max < 4096 ? files.rlim_max : 4096;
    CHECK(setrlimit(RLIMIT_NOFILE, &files) == 0);
    test_those_of_the_sets();
    test_a_number_that_is_anothers();
    test_an_address_of_both_versions();
    return 0;
}
