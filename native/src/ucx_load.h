/* The table of libucp's functions, filled by ucx_load.c. No other file names a library symbol. */
#ifndef KVP_UCX_LOAD_H
#define KVP_UCX_LOAD_H

#include "ucp_abi.h"

/* X(result, name, arguments): the functions of libucp that must be there. */
#define KVP_UCP_FUNCTIONS(X)                                                                       \
    X(void, get_version, (unsigned *major, unsigned *minor, unsigned *release))                    \
    X(ucx_status, config_read, (const char *prefix, const char *file, ucx_config **out))             \
    X(ucx_status, config_modify, (ucx_config * config, const char *name, const char *value))         \
    X(void, config_release, (ucx_config * config))                                                 \
    X(ucx_status, init_version,                                                                      \
      (unsigned major, unsigned minor, const ucx_params *params, const ucx_config *config,         \
       ucx_context **out))                                                                         \
    X(void, cleanup, (ucx_context * context))                                                      \
    X(ucx_status, worker_create,                                                                     \
      (ucx_context * context, const ucx_worker_params *params, ucx_worker **out))                  \
    X(void, worker_destroy, (ucx_worker * worker))                                                 \
    X(unsigned, worker_progress, (ucx_worker * worker))                                            \
    X(ucx_status, worker_get_efd, (ucx_worker * worker, int *fd))                                    \
    X(ucx_status, worker_arm, (ucx_worker * worker))                                                 \
    X(ucx_status, worker_set_am_recv_handler, (ucx_worker * worker, const ucx_am_handler *handler))  \
    X(ucx_status, listener_create,                                                                   \
      (ucx_worker * worker, const ucx_listener_params *params, ucx_listener **out))                \
    X(ucx_status, listener_query, (ucx_listener * listener, ucx_listener_attr *attr))                \
    X(void, listener_destroy, (ucx_listener * listener))                                           \
    X(ucx_status, listener_reject, (ucx_listener * listener, ucx_conn_request * request))            \
    X(ucx_status, ep_create, (ucx_worker * worker, const ucx_ep_params *params, ucx_ep **out))       \
    X(void *, ep_close_nbx, (ucx_ep * ep, const ucx_request_param *param))                         \
    X(void *, ep_flush_nbx, (ucx_ep * ep, const ucx_request_param *param))                         \
    X(ucx_status, ep_query, (ucx_ep * ep, ucx_ep_attr *attr))                                        \
    X(ucx_status, ep_rkey_unpack, (ucx_ep * ep, const void *packed, ucx_rkey **out))                 \
    X(void, rkey_destroy, (ucx_rkey * rkey))                                                       \
    X(ucx_status, mem_map, (ucx_context * context, const ucx_map_params *params, ucx_memory **out))  \
    X(ucx_status, mem_unmap, (ucx_context * context, ucx_memory * memory))                           \
    X(ucx_status, rkey_pack,                                                                         \
      (ucx_context * context, ucx_memory * memory, void **packed, size_t *size))                   \
    X(void, rkey_buffer_release, (void *packed))                                                   \
    X(void *, put_nbx,                                                                             \
      (ucx_ep * ep, const void *local, size_t size, uint64_t remote, ucx_rkey *rkey,               \
       const ucx_request_param *param))                                                            \
    X(void *, get_nbx,                                                                             \
      (ucx_ep * ep, void *local, size_t size, uint64_t remote, ucx_rkey *rkey,                     \
       const ucx_request_param *param))                                                            \
    X(void *, am_send_nbx,                                                                         \
      (ucx_ep * ep, unsigned id, const void *header, size_t header_size, const void *data,         \
       size_t size, const ucx_request_param *param))                                               \
    X(ucx_status, request_query, (void *request, ucx_request_attr *attr))                            \
    X(ucx_status, request_check_status, (void *request))                                             \
    X(void, request_free, (void *request))

typedef struct {
#define KVP_FIELD(result, name, arguments) result(*name) arguments;
    KVP_UCP_FUNCTIONS(KVP_FIELD)
#undef KVP_FIELD
    unsigned major, minor, release;
} kvp_ucp;

#endif
