/* Two engines of one process talk over loopback. Run by tests/native/test_ucx_native.py under
 * sanitizers; argv[1] is the library. Every wait has a deadline, and a failed check ends the run. */
#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "kvpool.h"

#include <stdio.h>

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                        \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

enum { ENDPOINTS = 4, SPANS = 64 };
static const size_t PART = 4 << 20;
static const uint64_t SECOND = 1000000000;

typedef struct {
    kvp_ucx *engine;
    uint8_t *inbox;
    uint8_t incarnation[16];
} side;

static const char *library;
static uint64_t look_ns = 60000000000;
static size_t trial_bytes;

static side open_side(uint8_t name, const char *host)
{
    side it = {0};
    memset(it.incarnation, name, sizeof(it.incarnation));
    it.inbox = mmap(NULL, ENDPOINTS * PART, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                    -1, 0);
    CHECK(it.inbox != MAP_FAILED);
    kvp_ucx_config config = {
        .library = library,
        .host = host,
        .incarnation = it.incarnation,
        .inbox = (uintptr_t)it.inbox,
        .inbox_part = PART,
        .trial_bytes = trial_bytes,
        .endpoint_max = ENDPOINTS,
        .batch_max = 8,
        .heartbeat_interval_ns = SECOND / 10,
        .heartbeat_timeout_ns = 20 * SECOND,
        .look_ns = look_ns,
        .spin_ns = 50000,
    };
    char reason[256] = "";
    kvp_status status = kvp_ucx_open(&config, reason, sizeof(reason), &it.engine);
    if (status != KVP_OK) {
        fprintf(stderr, "open: %d %s\n", status, reason);
    }
    CHECK(status == KVP_OK);
    return it;
}

static void close_side(side *it)
{
    kvp_ucx_close(it->engine);
    munmap(it->inbox, ENDPOINTS * PART);
}

static kvp_ucx_event next(side *it, kvp_ucx_event_kind kind)
{
    static kvp_ucx_event event;
    CHECK(kvp_ucx_next_event(it->engine, 20 * SECOND, &event) == KVP_OK);
    if (event.kind != kind) {
        fprintf(stderr, "event %d status %d code %d, wanted %d\n", event.kind, event.status,
                event.ucx_code, kind);
    }
    CHECK(event.kind == kind);
    if (kind == KVP_UCX_CLOSED) {
        CHECK(kvp_ucx_release(it->engine, event.endpoint) == KVP_OK);
        CHECK(kvp_ucx_release(it->engine, event.endpoint) == KVP_OK);
    }
    return event;
}

static uint16_t listen_on(side *it)
{
    uint16_t port = 0;
    int code = 0;
    CHECK(kvp_ucx_listen(it->engine, 0, 10000000000, &port, &code) == KVP_OK);
    CHECK(port != 0);
    CHECK(kvp_ucx_listen(it->engine, 0, 10000000000, &port, &code) == KVP_BUSY);
    return port;
}

static uint64_t connect_to(side *client, const char *host, uint16_t port, const uint8_t *expected)
{
    uint64_t endpoint;
    CHECK(kvp_ucx_connect(client->engine, host, port, expected, 10 * SECOND, &endpoint) == KVP_OK);
    return endpoint;
}

/* A listen that is given up at its deadline may come to be yet, and is in nobody's way. */
static void test_late_listen(void)
{
    side it = open_side(3, "127.0.0.1");
    uint16_t port = 0;
    int code = 0;
    kvp_status status = kvp_ucx_listen(it.engine, 0, 0, &port, &code);
    CHECK(status == KVP_TIMEOUT || status == KVP_OK);
    CHECK(kvp_ucx_listen(it.engine, 0, 0, &port, &code) == KVP_BUSY);
    close_side(&it);
}

static void test_wake(side *it)
{
    kvp_ucx_event event;
    kvp_ucx_wake_events(it->engine);
    CHECK(kvp_ucx_next_event(it->engine, 3600 * SECOND, &event) == KVP_MISS);
    CHECK(kvp_ucx_next_event(it->engine, 0, &event) == KVP_MISS);
}

/* Neighbours go in one put, up to 1 MiB, and a larger span in several: always all of it. */
static void test_neighbours(side *server, side *client, uint64_t endpoint, const uint8_t *inbox,
                            uint8_t *local)
{
    /* Neighbours go in one put, up to 1 MiB, and a larger span goes in several: always all of it. */
    kvp_ucx_counts before, after;
    kvp_ucx_count(client->engine, &before);
    for (size_t i = 0; i < PART; i++) {
        local[i] = (uint8_t)(i * 31 + i / 251);
    }
    kvp_ucx_span near[10] = {{(uintptr_t)local, (3 << 20) + 7, 0}};
    uint64_t at = near[0].size;
    for (size_t i = 1; i < 10; i++) {
        near[i] = (kvp_ucx_span){(uintptr_t)local + at, 1000, at};
        at += 1000;
    }
    CHECK(kvp_ucx_put(client->engine, endpoint, near, 10, (const uint8_t *)"n", 1, 10 * SECOND, 5) ==
          KVP_OK);
    next(server, KVP_UCX_ARRIVED);
    CHECK(next(client, KVP_UCX_BATCH).status == KVP_OK);
    CHECK(memcmp(inbox, local, at) == 0);
    kvp_ucx_count(client->engine, &after);
    CHECK(after.put_bytes - before.put_bytes == at);
    CHECK(after.puts - before.puts == 4 && after.coalesced - before.coalesced == 9);
    char lanes[64];
    CHECK(kvp_ucx_lanes(client->engine, endpoint, lanes, sizeof(lanes)) == KVP_OK);
    CHECK(strcmp(lanes, "tcp/lo") == 0);
}

static void test_put(side *server, side *client, uint16_t port)
{
    uint64_t endpoint = connect_to(client, "127.0.0.1", port, server->incarnation);
    kvp_ucx_event opened = next(client, KVP_UCX_OPENED);
    CHECK(opened.endpoint == endpoint && !opened.accepted && opened.peer_inbox_bytes == PART);
    CHECK(memcmp(opened.peer, server->incarnation, 16) == 0);
    opened = next(server, KVP_UCX_OPENED);
    CHECK(opened.accepted && memcmp(opened.peer, client->incarnation, 16) == 0);
    const uint8_t *inbox = server->inbox + opened.inbox_offset;

    size_t size = PART / SPANS;
    uint8_t *local = malloc(PART);
    CHECK(local != NULL);
    kvp_ucx_span spans[SPANS];
    for (size_t i = 0; i < SPANS; i++) {
        spans[i] = (kvp_ucx_span){(uintptr_t)local + i * size, size, (SPANS - 1 - i) * size};
    }
    /* More notes than the window, so credits must flow back. */
    for (uint64_t round = 0; round < 200; round++) {
        memset(local, (int)(round + 1), PART);
        local[7] = (uint8_t)~round;
        CHECK(kvp_ucx_put(client->engine, endpoint, spans, SPANS, (const uint8_t *)&round,
                          sizeof(round), 10 * SECOND, round + 77) == KVP_OK);
        kvp_ucx_event arrived = next(server, KVP_UCX_ARRIVED);
        CHECK(arrived.note_size == sizeof(round) && memcmp(arrived.note, &round, 8) == 0);
        CHECK(inbox[(SPANS - 1) * size + 7] == (uint8_t)~round);
        CHECK(memcmp(inbox + size, local, 7) == 0 && inbox[size - 1] == (uint8_t)(round + 1));
        kvp_ucx_event done = next(client, KVP_UCX_BATCH);
        CHECK(done.status == KVP_OK && done.cookie == round + 77 && done.endpoint == endpoint);
    }
    test_neighbours(server, client, endpoint, inbox, local);
    /* Nothing that is wrong reaches the wire. */
    kvp_ucx_span past = {(uintptr_t)local, 2, PART - 1};
    CHECK(kvp_ucx_put(client->engine, endpoint, &past, 1, NULL, 0, SECOND, 1) == KVP_INVALID);
    past = (kvp_ucx_span){(uintptr_t)local, 2, UINT64_MAX};
    CHECK(kvp_ucx_put(client->engine, endpoint, &past, 1, NULL, 0, SECOND, 1) == KVP_INVALID);
    past = (kvp_ucx_span){(uintptr_t)local, 0, 0};
    CHECK(kvp_ucx_put(client->engine, endpoint, &past, 1, NULL, 0, SECOND, 1) == KVP_INVALID);
    CHECK(kvp_ucx_put(client->engine, endpoint, NULL, 0, NULL, 0, SECOND, 1) == KVP_INVALID);
    CHECK(kvp_ucx_put(client->engine, endpoint + 1, spans, 1, NULL, 0, SECOND, 1) == KVP_CLOSED);

    CHECK(kvp_ucx_release(client->engine, endpoint) == KVP_BUSY);
    CHECK(kvp_ucx_disconnect(client->engine, endpoint) == KVP_OK);
    kvp_ucx_event closed = next(client, KVP_UCX_CLOSED);
    CHECK(closed.endpoint == endpoint && closed.status == KVP_CLOSED);
    closed = next(server, KVP_UCX_CLOSED);
    CHECK(closed.status == KVP_PEER);
    CHECK(kvp_ucx_put(client->engine, endpoint, spans, 1, NULL, 0, SECOND, 1) == KVP_CLOSED);
    CHECK(kvp_ucx_disconnect(client->engine, endpoint) == KVP_OK);
    free(local);
}

static void test_window(side *server, side *client, uint16_t port)
{
    uint64_t endpoint = connect_to(client, "127.0.0.1", port, NULL);
    next(client, KVP_UCX_OPENED);
    next(server, KVP_UCX_OPENED);
    uint8_t note[4] = "note";
    int sent = 0;
    while (kvp_ucx_put(client->engine, endpoint, NULL, 0, note, 4, 10 * SECOND, 1) == KVP_OK) {
        CHECK(next(client, KVP_UCX_BATCH).status == KVP_OK);
        sent++;
    }
    CHECK(sent == 64);
    for (int i = 0; i < sent; i++) {
        next(server, KVP_UCX_ARRIVED);
    }
    kvp_status status;
    int tries = 0;
    while ((status = kvp_ucx_put(client->engine, endpoint, NULL, 0, note, 4, SECOND, 1)) == KVP_FULL) {
        CHECK(tries++ < 2000);
        usleep(1000);
    }
    CHECK(status == KVP_OK);
    CHECK(next(client, KVP_UCX_BATCH).status == KVP_OK);
    next(server, KVP_UCX_ARRIVED);
    kvp_ucx_disconnect(client->engine, endpoint);
    CHECK(next(client, KVP_UCX_CLOSED).status == KVP_CLOSED);
    next(server, KVP_UCX_CLOSED);
}

/* A note with cookie 0 arrives, and its sender hears nothing of it: its batch is free again all the same. */
static void test_untold(side *server, side *client, uint16_t port)
{
    uint64_t endpoint = connect_to(client, "127.0.0.1", port, NULL);
    next(client, KVP_UCX_OPENED);
    next(server, KVP_UCX_OPENED);
    uint8_t note[4] = "note";
    kvp_ucx_counts before, after;
    kvp_ucx_count(client->engine, &before);
    for (int i = 0; i < 40; i++) {
        CHECK(kvp_ucx_put(client->engine, endpoint, NULL, 0, note, 4, 10 * SECOND, 0) == KVP_OK);
        next(server, KVP_UCX_ARRIVED);
    }
    CHECK(kvp_ucx_put(client->engine, endpoint, NULL, 0, note, 4, 10 * SECOND, 7) == KVP_OK);
    next(server, KVP_UCX_ARRIVED);
    kvp_ucx_event ended = next(client, KVP_UCX_BATCH);
    CHECK(ended.cookie == 7 && ended.status == KVP_OK);
    kvp_ucx_count(client->engine, &after);
    CHECK(after.batches == before.batches);
    /* An end with some on their way: CLOSED is all that is heard of them, and they are free again. */
    for (int i = 0; i < 40; i++) {
        kvp_status status =
            kvp_ucx_put(client->engine, endpoint, NULL, 0, note, 4, 10 * SECOND, 0);
        CHECK(status == KVP_OK || status == KVP_FULL);
    }
    kvp_ucx_disconnect(client->engine, endpoint);
    CHECK(next(client, KVP_UCX_CLOSED).status == KVP_CLOSED);
    kvp_ucx_count(client->engine, &after);
    CHECK(after.batches == before.batches);
    kvp_ucx_event event;
    do {
        CHECK(kvp_ucx_next_event(server->engine, 20 * SECOND, &event) == KVP_OK);
        CHECK(event.kind == KVP_UCX_ARRIVED || event.kind == KVP_UCX_CLOSED);
    } while (event.kind != KVP_UCX_CLOSED);
    CHECK(kvp_ucx_release(server->engine, event.endpoint) == KVP_OK);
}

/* A batch that is cancelled ends, with its note or without; those before and behind it are whole. */
static void test_cancel(side *server, side *client, uint16_t port)
{
    enum { BATCHES = 4, ROUNDS = 12, SIZE = 1 << 20 };
    uint64_t endpoint = connect_to(client, "127.0.0.1", port, NULL);
    next(client, KVP_UCX_OPENED);
    next(server, KVP_UCX_OPENED);
    uint8_t *local = calloc(1, SIZE);
    CHECK(local != NULL);
    const kvp_ucx_span span = {(uintptr_t)local, SIZE, 0};
    size_t cancelled = 0;
    for (uint64_t round = 0; round < ROUNDS || cancelled == 0; round++) {
        CHECK(round < 2000);
        for (uint64_t i = 0; i < BATCHES; i++) {
            CHECK(kvp_ucx_put(client->engine, endpoint, &span, 1, (const uint8_t *)&i, sizeof(i),
                              20 * SECOND, i) == KVP_OK);
        }
        kvp_ucx_cancel_put(client->engine, endpoint, round % BATCHES);
        kvp_ucx_cancel_put(client->engine, endpoint, BATCHES - 1);
        kvp_ucx_cancel_put(client->engine, endpoint, 99); /* nobody's */
        uint64_t whole = 0;
        for (uint64_t i = 0; i < BATCHES; i++) {
            kvp_ucx_event event = next(client, KVP_UCX_BATCH);
            bool asked = event.cookie == round % BATCHES || event.cookie == BATCHES - 1;
            CHECK(event.status == KVP_OK || (asked && event.status == KVP_CANCELLED));
            whole += event.status == KVP_OK ? 1 : 0;
            cancelled += event.status == KVP_OK ? 0 : 1;
        }
        for (uint64_t i = 0; i < whole; i++) {
            next(server, KVP_UCX_ARRIVED);
        }
        kvp_ucx_cancel_put(client->engine, endpoint, 0); /* it has ended */
    }
    kvp_ucx_disconnect(client->engine, endpoint);
    next(client, KVP_UCX_CLOSED);
    next(server, KVP_UCX_CLOSED);
    free(local);
}

static void test_refusals(side *server, side *client, uint16_t port)
{
    uint8_t other[16] = {9};
    uint64_t endpoint = connect_to(client, "127.0.0.1", port, other);
    kvp_ucx_event closed = next(client, KVP_UCX_CLOSED);
    CHECK(closed.endpoint == endpoint && closed.status == KVP_STALE);
    CHECK(memcmp(closed.peer, server->incarnation, 16) == 0);
    connect_to(client, "127.0.0.1", 1, NULL);
    CHECK(next(client, KVP_UCX_CLOSED).status == KVP_PEER);
    CHECK(kvp_ucx_connect(client->engine, "::1", port, NULL, SECOND, &endpoint) == KVP_INVALID);
    CHECK(kvp_ucx_connect(client->engine, "localhost", port, NULL, SECOND, &endpoint) ==
          KVP_INVALID);
}

static void test_churn(side *server, side *client, uint16_t port)
{
    for (int i = 0; i < 50; i++) {
        uint64_t endpoint = connect_to(client, "127.0.0.1", port, NULL);
        next(client, KVP_UCX_OPENED);
        uint64_t other = next(server, KVP_UCX_OPENED).endpoint;
        kvp_ucx_disconnect((i & 1) != 0 ? server->engine : client->engine,
                           (i & 1) != 0 ? other : endpoint);
        next(client, KVP_UCX_CLOSED);
        next(server, KVP_UCX_CLOSED);
    }
    kvp_ucx_counts counts;
    kvp_ucx_count(client->engine, &counts);
    CHECK(counts.endpoints == 0 && counts.batches == 0);
}

static void test_close_with_work(const char *host)
{
    side server = open_side(3, host), client = open_side(4, host);
    uint16_t port = listen_on(&server);
    uint64_t endpoint = connect_to(&client, host, port, NULL);
    next(&client, KVP_UCX_OPENED);
    static uint8_t local[4 << 20];
    kvp_ucx_span span = {(uintptr_t)local, sizeof(local), 0};
    for (uint64_t i = 0; i < 8; i++) {
        CHECK(kvp_ucx_put(client.engine, endpoint, &span, 1, NULL, 0, SECOND * 10, i) == KVP_OK);
    }
    CHECK(kvp_ucx_put(client.engine, endpoint, &span, 1, NULL, 0, SECOND, 9) == KVP_FULL);
    close_side(&client);
    close_side(&server);
}

/* What says no UCX to the listener is reset, also when it says more than libucp reads, or goes. */
static void test_strangers(void)
{
    look_ns = SECOND / 5;
    side server = open_side(1, "127.0.0.1");
    look_ns = 60 * SECOND;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(listen_on(&server))};
    CHECK(inet_pton(AF_INET, "127.0.0.1", &address.sin_addr) == 1);
    const size_t sizes[] = {5000, 100000, 5000};
    int sockets[3];
    uint8_t *said = calloc(1, 100000);
    CHECK(said != NULL);
    for (size_t i = 0; i < 3; i++) {
        sockets[i] = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(connect(sockets[i], (const struct sockaddr *)&address, sizeof(address)) == 0);
        CHECK(send(sockets[i], said, sizes[i], 0) == (ssize_t)sizes[i]);
    }
    close(sockets[2]);
    kvp_ucx_counts counts = {0};
    for (int turn = 0; counts.strangers_reset < 3; turn++) {
        CHECK(turn < 2000);
        usleep(10000);
        kvp_ucx_count(server.engine, &counts);
    }
    CHECK(recv(sockets[0], said, 1, 0) < 0 && errno == ECONNRESET);
    close(sockets[0]);
    close(sockets[1]);
    free(said);
    side client = open_side(2, "127.0.0.1");
    connect_to(&client, "127.0.0.1", ntohs(address.sin_port), server.incarnation);
    next(&client, KVP_UCX_OPENED);
    close_side(&client);
    close_side(&server);
}

static bool all_are(const uint8_t *bytes, size_t size, uint8_t value)
{
    return bytes[0] == value && memcmp(bytes, bytes + 1, size - 1) == 0;
}

/* How bulk goes is known before anybody hears of the first connection, and costs no byte of an inbox. */
static void test_trial(void)
{
    trial_bytes = KVP_UCX_TRIAL_BYTES;
    side server = open_side(1, "127.0.0.1"), client = open_side(2, "127.0.0.1");
    trial_bytes = 0;
    size_t inbox_bytes = PART - KVP_UCX_TRIAL_BYTES;
    memset(server.inbox, 7, ENDPOINTS * PART);
    memset(client.inbox, 7, ENDPOINTS * PART);
    uint16_t port = listen_on(&server);
    char text[256] = "";
    CHECK(kvp_ucx_put_protocol(client.engine, text, sizeof(text)) == KVP_MISS);
    connect_to(&client, "127.0.0.1", port, server.incarnation);
    kvp_ucx_event opened = next(&client, KVP_UCX_OPENED);
    CHECK(kvp_ucx_put_protocol(client.engine, text, sizeof(text)) == KVP_OK);
    CHECK(strstr(text, "zero-copy") != NULL && opened.peer_inbox_bytes == inbox_bytes);
    const uint8_t *inbox = server.inbox + next(&server, KVP_UCX_OPENED).inbox_offset;
    CHECK(kvp_ucx_put_protocol(server.engine, text, sizeof(text)) == KVP_OK);
    CHECK(strstr(text, "zero-copy") != NULL);
    /* A note comes after what was put before it. */
    CHECK(kvp_ucx_put(client.engine, opened.endpoint, NULL, 0, (const uint8_t *)"x", 1, 10 * SECOND,
                      1) == KVP_OK);
    next(&server, KVP_UCX_ARRIVED);
    next(&client, KVP_UCX_BATCH);
    CHECK(all_are(inbox + inbox_bytes, KVP_UCX_TRIAL_BYTES, 0));
    memset(server.inbox + (inbox - server.inbox) + inbox_bytes, 7, KVP_UCX_TRIAL_BYTES);
    CHECK(all_are(server.inbox, ENDPOINTS * PART, 7));
    kvp_ucx_span past = {(uintptr_t)text, 2, inbox_bytes - 1};
    CHECK(kvp_ucx_put(client.engine, opened.endpoint, &past, 1, NULL, 0, SECOND, 1) == KVP_INVALID);
    kvp_ucx_counts counts;
    kvp_ucx_count(client.engine, &counts);
    CHECK(counts.puts == 0 && counts.put_bytes == 0);
    /* One trial an engine, not one a connection. */
    connect_to(&client, "127.0.0.1", port, server.incarnation);
    uint64_t second = next(&client, KVP_UCX_OPENED).endpoint;
    next(&server, KVP_UCX_OPENED);
    CHECK(kvp_ucx_put(client.engine, second, NULL, 0, (const uint8_t *)"x", 1, 10 * SECOND, 2) ==
          KVP_OK);
    next(&server, KVP_UCX_ARRIVED);
    CHECK(all_are(server.inbox, ENDPOINTS * PART, 7));
    close_side(&client);
    close_side(&server);
}

static void test_bad_settings(void)
{
    uint8_t incarnation[16] = {1};
    kvp_ucx_config config = {
        .library = library,
        .host = "127.0.0.1",
        .incarnation = incarnation,
        .endpoint_max = 1,
        .batch_max = 1,
        .look_ns = SECOND,
    };
    kvp_ucx *engine;
    char reason[128];
    config.inbox = 64;
    config.inbox_part = PART;
    CHECK(kvp_ucx_open(&config, reason, sizeof(reason), &engine) == KVP_INVALID);
    config.inbox = (uintptr_t)sysconf(_SC_PAGESIZE);
    config.trial_bytes = PART;
    CHECK(kvp_ucx_open(&config, reason, sizeof(reason), &engine) == KVP_INVALID);
    config.inbox = config.inbox_part = config.trial_bytes = 0;
    config.host = "203.0.113.1";
    CHECK(kvp_ucx_open(&config, reason, sizeof(reason), &engine) == KVP_INVALID);
    config.host = "::";
    CHECK(kvp_ucx_open(&config, reason, sizeof(reason), &engine) == KVP_INVALID);
    config.host = "127.0.0.1";
    config.library = "libnosuch.so.9";
    CHECK(kvp_ucx_open(&config, reason, sizeof(reason), &engine) == KVP_SYSTEM);
    kvp_ucx_close(NULL);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    library = argv[1];
    test_bad_settings();
    side server = open_side(1, "127.0.0.1"), client = open_side(2, "127.0.0.1");
    uint16_t port = listen_on(&server);
    test_wake(&server);
    test_put(&server, &client, port);
    char text[256] = "";
    CHECK(kvp_ucx_put_protocol(client.engine, text, sizeof(text)) == KVP_OK);
    printf("%s\n", text);
    test_window(&server, &client, port);
    test_untold(&server, &client, port);
    test_cancel(&server, &client, port);
    test_refusals(&server, &client, port);
    test_churn(&server, &client, port);
    close_side(&client);
    close_side(&server);
    test_trial();
    test_strangers();
    test_late_listen();
    test_close_with_work("127.0.0.1");
    test_close_with_work("::1");
    kvp_ucx_last_warning(text, sizeof(text));
    printf("%s\n", text);
    return 0;
}
