/* ucx_strangers.c: more strangers than are remembered. Its time is the test's, its sockets are real. */
#include "../src/ucx_strangers.c"

#include <arpa/inet.h>
#include <sys/resource.h>

#include "check.h"

enum { MORE = 76, STRANGERS = KVP_STRANGERS_MAX + MORE };

static kvp_ucx engine;
static int accepted[STRANGERS];

static uint64_t resets(void)
{
    return atomic_load(&engine.strangers_reset);
}

static void look(void)
{
    engine.now_ns += engine.config.look_ns;
    engine.due_ns = UINT64_MAX;
    kvp_strangers_look(&engine);
    CHECK(engine.due_ns == engine.now_ns + engine.config.look_ns);
}

static int listen_here(void)
{
    struct sockaddr_in *host = (struct sockaddr_in *)&engine.host;
    socklen_t size = sizeof(*host);
    host->sin_family = AF_INET;
    host->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(listener >= 0 && bind(listener, (const struct sockaddr *)host, size) == 0);
    CHECK(listen(listener, 8) == 0);
    CHECK(getsockname(listener, (struct sockaddr *)host, &size) == 0);
    engine.listen_port = ntohs(host->sin_port);
    engine.listener = (ucx_listener *)&engine;
    engine.config.look_ns = 1000000000;
    return listener;
}

/* Connect and go: what was accepted stays open until somebody closes it. */
static int be_stranger(int listener)
{
    int peer = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(peer >= 0);
    CHECK(connect(peer, (const struct sockaddr *)&engine.host, sizeof(struct sockaddr_in)) == 0);
    int fd = accept(listener, NULL, NULL);
    CHECK(fd >= 0);
    close(peer);
    return fd;
}

/* Close those that were reset, as libucp does; return how many are left. */
static size_t close_reset(void)
{
    size_t left = 0;
    for (size_t i = 0; i < STRANGERS; i++) {
        struct sockaddr_storage there;
        socklen_t size = sizeof(there);
        if (accepted[i] >= 0 && getpeername(accepted[i], (struct sockaddr *)&there, &size) != 0) {
            close(accepted[i]);
            accepted[i] = -1;
        }
        left += accepted[i] >= 0;
    }
    return left;
}

int main(void)
{
    struct rlimit files;
    CHECK(getrlimit(RLIMIT_NOFILE, &files) == 0);
    files.rlim_cur = files.rlim_max;
    CHECK(setrlimit(RLIMIT_NOFILE, &files) == 0);
    int listener = listen_here();
    look();
    CHECK(resets() == 0 && engine.stranger_count == 0);
    for (size_t i = 0; i < STRANGERS; i++) {
        accepted[i] = be_stranger(listener);
    }
    kvp_strangers_look(&engine); /* not yet due */
    CHECK(engine.stranger_count == 0);
    /* As many as are remembered have until the next look; the others go unseen. */
    look();
    CHECK(resets() == MORE && engine.stranger_count == KVP_STRANGERS_MAX);
    CHECK(close_reset() == KVP_STRANGERS_MAX);
    look();
    CHECK(resets() == STRANGERS && engine.stranger_count == 0);
    CHECK(close_reset() == 0);
    close(listener);
    return 0;
}
