/* The reference for a batch put over TCP: a plain loop of ucp_put_nbx and one flush.
 *
 *   ucx_put LIBRARY serve BYTES        registers memory, prints its port, sleeps when idle
 *   ucx_put LIBRARY send PORT BYTES    for each line "SIZE COUNT STRIDE" puts COUNT spans of SIZE
 *                                      bytes, every STRIDE-th, and prints the seconds until the flush
 *                                      completed
 *
 * Same library, settings, congestion control, error handling mode and spans as the engine: distinct blocks of a source
 * as large as the destination, which both rotate through: the n-th span since the start is block
 * n * STRIDE of them, modulo their number, which STRIDE must not divide. One thread a side, no queue, no note. Both
 * poll for 50 us after the last progress and then sleep, as the engine does; with `poll` instead of
 * `send` the sender never sleeps while it waits.
 */
#include <netinet/in.h>
#include <arpa/inet.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "../../native/src/ucx_engine.h"

enum { AM_ID = 5 };

typedef struct {
    uint64_t address;
    uint64_t key_size;
    uint8_t key[1024];
} offer;

static const kvp_ucp *ucp;
static ucx_context *context;
static ucx_worker *worker;
static ucx_ep *accepted;
static offer remote;
static size_t waiting;
static int failed;
static uint64_t spin_ns = 50000;

static void check(int good, const char *what)
{
    if (!good) {
        fprintf(stderr, "%s\n", what);
        exit(1);
    }
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static void on_error(void *arg, ucx_ep *ep, ucx_status status)
{
    (void)arg;
    (void)ep;
    (void)status;
    failed = 1;
}

static void on_done(void *request, ucx_status status, void *arg)
{
    (void)arg;
    failed |= status != UCX_OK;
    waiting--;
    ucp->request_free(request);
}

static void track(const void *request)
{
    check(!ucx_is_error(request), "a request was refused");
    waiting += request != NULL;
}

static ucx_status on_offer(void *arg, const void *header, size_t header_size, void *data,
                           size_t size, const ucx_am_recv_param *param)
{
    (void)arg;
    (void)data;
    (void)size;
    (void)param;
    memcpy(&remote, header, header_size);
    return UCX_OK;
}

static ucx_status on_hello(void *arg, const void *header, size_t header_size, void *data,
                           size_t size, const ucx_am_recv_param *param)
{
    (void)header;
    (void)header_size;
    (void)data;
    (void)size;
    const ucx_request_param done = {.op_attr_mask = UCX_OP_CALLBACK, .cb = on_done};
    kvp_sockets_unpace(ucp, worker);
    track(ucp->am_send_nbx(param->reply_ep, AM_ID, arg, sizeof(offer), NULL, 0, &done));
    return UCX_OK;
}

static void on_connection(ucx_conn_request *request, void *arg)
{
    (void)arg;
    ucx_ep_params params = {
        .field_mask = UCX_EP_ERR_MODE | UCX_EP_ERR_HANDLER | UCX_EP_CONN_REQUEST,
        .err_mode = UCX_ERR_MODE_PEER,
        .err_handler = {on_error, NULL},
        .conn_request = request,
    };
    check(ucp->ep_create(worker, &params, &accepted) == UCX_OK, "ep_create");
}

static void start(const char *library, ucx_am_cb callback, void *arg)
{
    static const char *const settings[][2] = {
        {"TLS", "tcp"},           {"NET_DEVICES", "lo"},     {"RNDV_THRESH", "inf"},
        {"TCP_CM_REUSEADDR", "y"}, {"TCP_USER_TIMEOUT", "3s"}, {"TCP_KEEPIDLE", "2s"},
        {"TCP_KEEPINTVL", "1s"},  {"TCP_AF_PRIO", "inet"},      {"TCP_RX_SEG_SIZE", "8kb"},
    };
    char reason[256] = "";
    ucp = kvp_ucp_load(library, reason, sizeof(reason));
    check(ucp != NULL, reason);
    ucx_config *config;
    check(ucp->config_read(NULL, NULL, &config) == UCX_OK, "config_read");
    for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); i++) {
        check(ucp->config_modify(config, settings[i][0], settings[i][1]) == UCX_OK, "config");
    }
    ucx_params params = {
        .field_mask = UCX_PARAM_FEATURES,
        .features = UCX_FEATURE_RMA | UCX_FEATURE_AM | UCX_FEATURE_WAKEUP,
    };
    check(ucp->init_version(UCX_API_MAJOR, UCX_API_MINOR, &params, config, &context) == UCX_OK,
          "init");
    ucp->config_release(config);
    ucx_worker_params worker_params = {0};
    check(ucp->worker_create(context, &worker_params, &worker) == UCX_OK, "worker_create");
    ucx_am_handler handler = {
        .field_mask = UCX_AM_HANDLER_ID | UCX_AM_HANDLER_CB | UCX_AM_HANDLER_ARG,
        .id = AM_ID,
        .cb = callback,
        .arg = arg,
    };
    check(ucp->worker_set_am_recv_handler(worker, &handler) == UCX_OK, "handler");
}

/* Progress once, or sleep until the library or stdin has something. */
static void wait_for_work(struct pollfd *stop)
{
    static uint64_t moved_ns;
    static struct pollfd ready[2] = {{.fd = -1, .events = POLLIN}, {.fd = -1, .events = POLLIN}};
    if (ready[0].fd < 0) {
        check(ucp->worker_get_efd(worker, &ready[0].fd) == UCX_OK, "efd");
    }
    if (ucp->worker_progress(worker) != 0) {
        moved_ns = now_ns();
    } else if (now_ns() - moved_ns > spin_ns && ucp->worker_arm(worker) == UCX_OK) {
        ready[1].fd = stop == NULL ? -1 : stop->fd;
        poll(ready, 2, -1);
        if (stop != NULL) {
            stop->revents = ready[1].revents;
        }
    }
}

static uint8_t *memory_of(size_t size)
{
    uint8_t *memory = mmap(NULL, size, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    check(memory != MAP_FAILED, "mmap");
    return memory;
}

static void serve(const char *library, size_t size)
{
    static offer mine;
    start(library, on_hello, &mine);
    ucx_map_params map = {
        .field_mask = UCX_MAP_ADDRESS | UCX_MAP_LENGTH,
        .address = memory_of(size),
        .length = size,
    };
    ucx_memory *memory;
    void *key;
    check(ucp->mem_map(context, &map, &memory) == UCX_OK, "mem_map");
    check(ucp->rkey_pack(context, memory, &key, &mine.key_size) == UCX_OK, "rkey_pack");
    check(mine.key_size <= sizeof(mine.key), "key size");
    memcpy(mine.key, key, mine.key_size);
    mine.address = (uint64_t)(uintptr_t)map.address;
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    ucx_listener_params params = {
        .field_mask = UCX_LISTENER_SOCK_ADDR | UCX_LISTENER_CONN_HANDLER,
        .sockaddr = {(const struct sockaddr *)&address, sizeof(address)},
        .conn_handler = {on_connection, NULL},
    };
    ucx_listener *listener;
    check(ucp->listener_create(worker, &params, &listener) == UCX_OK, "listener_create");
    ucx_listener_attr attr = {.field_mask = UCX_LISTENER_ATTR_SOCKADDR};
    check(ucp->listener_query(listener, &attr) == UCX_OK, "listener_query");
    printf("%u\n", ntohs(((const struct sockaddr_in *)&attr.sockaddr)->sin_port));
    fflush(stdout);
    struct pollfd input = {.fd = 0};
    while ((input.revents & (POLLIN | POLLHUP)) == 0) {
        wait_for_work(&input);
    }
}

static void send_all(const char *library, const char *port, size_t size)
{
    start(library, on_offer, NULL);
    uint8_t *source = memory_of(size);
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                  .sin_port = htons((uint16_t)atoi(port))};
    ucx_ep_params params = {
        .field_mask = UCX_EP_ERR_MODE | UCX_EP_ERR_HANDLER | UCX_EP_FLAGS | UCX_EP_SOCK_ADDR,
        .err_mode = UCX_ERR_MODE_PEER,
        .err_handler = {on_error, NULL},
        .flags = UCX_EP_CLIENT_SERVER,
        .sockaddr = {(const struct sockaddr *)&address, sizeof(address)},
    };
    ucx_ep *ep;
    check(ucp->ep_create(worker, &params, &ep) == UCX_OK, "ep_create");
    const ucx_request_param hello = {
        .op_attr_mask = UCX_OP_CALLBACK | UCX_OP_FLAGS,
        .flags = UCX_AM_SEND_REPLY,
        .cb = on_done,
    };
    track(ucp->am_send_nbx(ep, AM_ID, "h", 1, NULL, 0, &hello));
    while (remote.key_size == 0 && !failed) {
        wait_for_work(NULL);
    }
    ucx_rkey *rkey;
    check(!failed && ucp->ep_rkey_unpack(ep, remote.key, &rkey) == UCX_OK, "rkey_unpack");
    kvp_sockets_unpace(ucp, worker); /* as the engine's */
    const ucx_request_param done = {.op_attr_mask = UCX_OP_CALLBACK, .cb = on_done};
    size_t span, count, stride, turn = 0;
    while (scanf("%zu %zu %zu", &span, &count, &stride) == 3) {
        size_t blocks = size / span;
        check(count <= blocks, "more than the memory");
        uint64_t begin = now_ns();
        for (size_t i = 0; i < count; i++, turn++) {
            size_t at = turn % blocks * stride % blocks * span;
            track(ucp->put_nbx(ep, source + at, span, remote.address + at, rkey, &done));
        }
        track(ucp->ep_flush_nbx(ep, &done));
        while (waiting != 0 && !failed) {
            wait_for_work(NULL);
        }
        check(!failed, "the transfer failed");
        printf("%.9f\n", (double)(now_ns() - begin) / 1e9);
        fflush(stdout);
    }
}

int main(int argc, char **argv)
{
    if (argc == 4 && strcmp(argv[2], "serve") == 0) {
        serve(argv[1], strtoull(argv[3], NULL, 10));
    } else if (argc == 5 && (strcmp(argv[2], "send") == 0 || strcmp(argv[2], "poll") == 0)) {
        spin_ns = strcmp(argv[2], "poll") == 0 ? UINT64_MAX : spin_ns;
        send_all(argv[1], argv[3], strtoull(argv[4], NULL, 10));
    } else {
        check(0, "usage: ucx_put LIBRARY serve BYTES | ucx_put LIBRARY send PORT BYTES");
    }
    return 0;
}
