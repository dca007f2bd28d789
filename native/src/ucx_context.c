/* The context, worker, listener and inbox registration of one engine, and the addresses they use.
 *
 * Everything here but the address functions runs on the progress thread. Settings are handed to
 * libucp one by one; the process's environment is neither read nor written by us.
 */
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <string.h>

#include "ucx_engine.h"

/* Reasons and measurements: docs/decisions/0003-ucx.md. */
static const struct {
    const char *name, *value;
    bool needed; /* a library that does not know the others is used without them */
} SETTINGS[] = {
    /* Rendezvous keeps the put protocol from being zero-copy with error handling on. */
    {"RNDV_THRESH", "inf", true},
    /* What comes with a put's header in one go is copied once more, from there to its place. With the
     * library's 64 KiB that was all of a small put; a message takes 8 KiB at most. */
    {"TCP_RX_SEG_SIZE", "8kb", false},
    {"TCP_CM_REUSEADDR", "y", false},
    /* Since 1.22. It finds a dead link under traffic; the batch's own deadline is the limit. */
    {"TCP_USER_TIMEOUT", "3s", false},
    {"TCP_KEEPIDLE", "2s", false},
    {"TCP_KEEPINTVL", "1s", false},
};

static bool is_wildcard(const struct sockaddr_storage *host)
{
    return host->ss_family == AF_INET &&
           ((const struct sockaddr_in *)host)->sin_addr.s_addr == INADDR_ANY;
}

static bool same_host(const struct sockaddr_storage *a, const struct sockaddr *b)
{
    if (b == NULL || a->ss_family != b->sa_family) {
        return false;
    }
    if (a->ss_family == AF_INET) {
        return memcmp(&((const struct sockaddr_in *)a)->sin_addr,
                      &((const struct sockaddr_in *)(const void *)b)->sin_addr,
                      sizeof(struct in_addr)) == 0;
    }
    return memcmp(&((const struct sockaddr_in6 *)a)->sin6_addr,
                  &((const struct sockaddr_in6 *)(const void *)b)->sin6_addr,
                  sizeof(struct in6_addr)) == 0;
}

kvp_status kvp_parse_address(const char *host, uint16_t port, struct sockaddr_storage *out,
                             socklen_t *size)
{
    memset(out, 0, sizeof(*out));
    struct sockaddr_in *four = (struct sockaddr_in *)out;
    struct sockaddr_in6 *six = (struct sockaddr_in6 *)out;
    if (inet_pton(AF_INET, host, &four->sin_addr) == 1) {
        four->sin_family = AF_INET;
        four->sin_port = htons(port);
        *size = sizeof(*four);
        return KVP_OK;
    }
    /* A wildcard of IPv6 would listen on both families, which the library does not survive. */
    if (inet_pton(AF_INET6, host, &six->sin6_addr) == 1 &&
        memcmp(&six->sin6_addr, &in6addr_any, sizeof(in6addr_any)) != 0) {
        six->sin6_family = AF_INET6;
        six->sin6_port = htons(port);
        *size = sizeof(*six);
        return KVP_OK;
    }
    return KVP_INVALID;
}

kvp_status kvp_find_device(const struct sockaddr_storage *host, char *name, size_t size)
{
    if (is_wildcard(host)) {
        snprintf(name, size, "all");
        return KVP_OK;
    }
    struct ifaddrs *all;
    if (getifaddrs(&all) != 0) {
        return KVP_SYSTEM;
    }
    kvp_status status = KVP_INVALID;
    for (const struct ifaddrs *each = all; each != NULL; each = each->ifa_next) {
        if (same_host(host, each->ifa_addr)) {
            snprintf(name, size, "%s", each->ifa_name);
            status = KVP_OK;
            break;
        }
    }
    freeifaddrs(all);
    return status;
}

static kvp_status refuse(kvp_ucx *engine, const char *what, ucx_status code)
{
    snprintf(engine->start_reason, sizeof(engine->start_reason), "%s answered %d", what, code);
    return KVP_SYSTEM;
}

static kvp_status configure(kvp_ucx *engine, ucx_config *config)
{
    const kvp_ucp *ucp = engine->ucp;
    for (size_t i = 0; i < sizeof(SETTINGS) / sizeof(SETTINGS[0]); i++) {
        ucx_status code = ucp->config_modify(config, SETTINGS[i].name, SETTINGS[i].value);
        if (code != UCX_OK && SETTINGS[i].needed) {
            return refuse(engine, SETTINGS[i].name, code);
        }
    }
    ucx_status code = ucp->config_modify(config, "TLS", engine->tls);
    if (code != UCX_OK) {
        return refuse(engine, "TLS", code);
    }
    /* TCP's device is that of the address. Others have names of their own, and libucp looks which of
     * them reach the peer. */
    if (strcmp(engine->tls, "tcp") == 0) {
        code = ucp->config_modify(config, "NET_DEVICES", engine->device);
        if (code != UCX_OK) {
            return refuse(engine, "NET_DEVICES", code);
        }
    }
    /* One family a context: with the default order an IPv6 client ends a "::1" listener's process. */
    const char *family = engine->host.ss_family == AF_INET6 ? "inet6" : "inet";
    code = ucp->config_modify(config, "TCP_AF_PRIO", family);
    return code == UCX_OK ? KVP_OK : refuse(engine, "TCP_AF_PRIO", code);
}

ucx_status kvp_context_register(kvp_ucx *engine, uintptr_t address, size_t size, unsigned prot,
                                kvp_registered *out)
{
    const kvp_ucp *ucp = engine->ucp;
    ucx_map_params params = {
        .field_mask = UCX_MAP_ADDRESS | UCX_MAP_LENGTH | UCX_MAP_PROT,
        .address = (void *)address,
        .length = size,
        .prot = prot,
    };
    ucx_status code = UCX_OK;
    if (out->memory == NULL) {
        code = ucp->mem_map(engine->context, &params, &out->memory);
        if (code != UCX_OK) {
            out->memory = NULL;
            return code;
        }
        atomic_fetch_add_explicit(&engine->registrations, 1, memory_order_relaxed);
    }
    code = ucp->rkey_pack(engine->context, out->memory, &out->rkey, &out->rkey_size);
    if (code == UCX_OK && out->rkey_size > KVP_RKEY_BYTES_MAX) {
        ucp->rkey_buffer_release(out->rkey);
        code = UCX_ERR_LAST;
    }
    if (code != UCX_OK) {
        out->rkey = NULL;
    }
    return code;
}

static void forget(kvp_ucx *engine, kvp_registered *registered)
{
    if (registered->rkey != NULL) {
        engine->ucp->rkey_buffer_release(registered->rkey);
    }
    if (registered->memory != NULL) {
        engine->ucp->mem_unmap(engine->context, registered->memory);
    }
}

static kvp_status register_inbox(kvp_ucx *engine)
{
    size_t part = engine->config.inbox_part;
    for (size_t i = 0; engine->config.inbox != 0 && i < engine->config.endpoint_max; i++) {
        ucx_status code = kvp_context_register(
            engine, engine->config.inbox + i * part, part,
            UCX_PROT_LOCAL_READ | UCX_PROT_LOCAL_WRITE | UCX_PROT_REMOTE_WRITE, &engine->parts[i]);
        if (code != UCX_OK) {
            return refuse(engine, "registration of the inbox", code);
        }
    }
    return KVP_OK;
}

static kvp_status open_worker(kvp_ucx *engine)
{
    const kvp_ucp *ucp = engine->ucp;
    ucx_worker_params worker_params = {0};
    ucx_status code = ucp->worker_create(engine->context, &worker_params, &engine->worker);
    if (code != UCX_OK) {
        return refuse(engine, "worker_create", code);
    }
    ucx_am_handler handler = {
        .field_mask = UCX_AM_HANDLER_ID | UCX_AM_HANDLER_CB | UCX_AM_HANDLER_ARG,
        .id = KVP_AM_ID,
        .cb = kvp_message_take,
        .arg = engine,
    };
    code = ucp->worker_set_am_recv_handler(engine->worker, &handler);
    return code == UCX_OK ? KVP_OK : refuse(engine, "set_am_recv_handler", code);
}

kvp_status kvp_context_open(kvp_ucx *engine)
{
    const kvp_ucp *ucp = engine->ucp;
    ucx_config *config;
    ucx_status code = ucp->config_read(NULL, NULL, &config);
    if (code != UCX_OK) {
        return refuse(engine, "config_read", code);
    }
    kvp_status status = configure(engine, config);
    if (status == KVP_OK) {
        ucx_params params = {
            .field_mask = UCX_PARAM_FEATURES,
            .features = UCX_FEATURE_RMA | UCX_FEATURE_AM | UCX_FEATURE_WAKEUP,
        };
        code = ucp->init_version(UCX_API_MAJOR, UCX_API_MINOR, &params, config, &engine->context);
        status = code == UCX_OK ? KVP_OK : refuse(engine, "init", code);
    }
    ucp->config_release(config);
    if (status == KVP_OK) {
        status = open_worker(engine);
    }
    return status == KVP_OK ? register_inbox(engine) : status;
}

void kvp_context_close(kvp_ucx *engine)
{
    const kvp_ucp *ucp = engine->ucp;
    if (engine->listener != NULL) {
        ucp->listener_destroy(engine->listener);
    }
    if (engine->worker != NULL) {
        ucp->worker_destroy(engine->worker);
    }
    for (size_t i = 0; i < engine->config.endpoint_max; i++) {
        forget(engine, &engine->parts[i]);
    }
    for (size_t i = 0; i < atomic_load(&engine->region_count); i++) {
        forget(engine, &engine->regions[i].whole);
    }
    if (engine->context != NULL) {
        ucp->cleanup(engine->context);
    }
}

static void take_connection(ucx_conn_request *request, void *arg)
{
    kvp_ucx *engine = arg;
    if (engine->pending_count < KVP_PENDING_CONNECTIONS_MAX) {
        engine->pending[engine->pending_count++] = request;
    } else {
        engine->ucp->listener_reject(engine->listener, request);
    }
}

ucx_status kvp_context_listen(kvp_ucx *engine)
{
    struct sockaddr_storage address = engine->host;
    /* sin_port and sin6_port lie at the same offset. */
    ((struct sockaddr_in *)&address)->sin_port = htons(engine->listen_port);
    ucx_listener_params params = {
        .field_mask = UCX_LISTENER_SOCK_ADDR | UCX_LISTENER_CONN_HANDLER,
        .sockaddr = {(const struct sockaddr *)&address, engine->host_size},
        .conn_handler = {take_connection, engine},
    };
    ucx_status code = engine->ucp->listener_create(engine->worker, &params, &engine->listener);
    if (code != UCX_OK) {
        return code;
    }
    ucx_listener_attr attr = {.field_mask = UCX_LISTENER_ATTR_SOCKADDR};
    code = engine->ucp->listener_query(engine->listener, &attr);
    if (code != UCX_OK) {
        engine->ucp->listener_destroy(engine->listener);
        engine->listener = NULL;
        return code;
    }
    engine->listen_port = ntohs(((const struct sockaddr_in *)&attr.sockaddr)->sin_port);
    return code;
}
