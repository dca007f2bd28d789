/* What kvpool uses of libucp's binary interface, declared here so that building needs no UCX.
 *
 * The request API of UCX 1.13: every struct carries a mask of the fields that are set, so later
 * versions, which only append fields, read no further than what is declared here. Names differ
 * from UCX's own, so that native/tests/ucp_abi_check.c can include both and compare every offset,
 * size and constant (tests/native/test_ucp_abi.py). Owns no code.
 */
#ifndef KVP_UCP_ABI_H
#define KVP_UCP_ABI_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/socket.h>

typedef int8_t ucx_status; /* ucs_status_t is a packed enum: one signed byte */

enum {
    UCX_OK = 0,
    UCX_ERR_LAST = -100
};

enum { UCX_API_MAJOR = 1, UCX_API_MINOR = 13 };

enum { UCX_PARAM_FEATURES = 1 << 0 };
enum { UCX_FEATURE_RMA = 1 << 1, UCX_FEATURE_WAKEUP = 1 << 4, UCX_FEATURE_AM = 1 << 6 };
enum { UCX_LISTENER_SOCK_ADDR = 1 << 0, UCX_LISTENER_CONN_HANDLER = 1 << 2 };
enum { UCX_LISTENER_ATTR_SOCKADDR = 1 << 0 };
enum {
    UCX_EP_ERR_MODE = 1 << 1,
    UCX_EP_ERR_HANDLER = 1 << 2,
    UCX_EP_SOCK_ADDR = 1 << 4,
    UCX_EP_FLAGS = 1 << 5,
    UCX_EP_CONN_REQUEST = 1 << 6
};
enum { UCX_EP_CLIENT_SERVER = 1 << 0, UCX_EP_CLOSE_FORCE = 1 << 0, UCX_ERR_MODE_PEER = 1 };
enum { UCX_MAP_ADDRESS = 1 << 0, UCX_MAP_LENGTH = 1 << 1, UCX_MAP_PROT = 1 << 3 };
enum {
    UCX_PROT_LOCAL_READ = 1 << 0,
    UCX_PROT_LOCAL_WRITE = 1 << 1,
    UCX_PROT_REMOTE_READ = 1 << 8,
    UCX_PROT_REMOTE_WRITE = 1 << 9
};
enum { UCX_AM_HANDLER_ID = 1 << 0, UCX_AM_HANDLER_CB = 1 << 2, UCX_AM_HANDLER_ARG = 1 << 3 };
enum { UCX_AM_SEND_REPLY = 1 << 0, UCX_AM_SEND_EAGER = 1 << 1 };
enum { UCX_AM_RECV_REPLY_EP = 1 << 0, UCX_AM_RECV_RNDV = 1 << 17 };
enum {
    UCX_OP_CALLBACK = 1 << 1,
    UCX_OP_USER_DATA = 1 << 2,
    UCX_OP_FLAGS = 1 << 4,
    UCX_OP_NO_IMM_CMPL = 1 << 16
};
enum { UCX_EP_ATTR_REMOTE = 1 << 2, UCX_EP_ATTR_TRANSPORTS = 1 << 3 };
enum { UCX_REQUEST_INFO = 1 << 0, UCX_REQUEST_INFO_SIZE = 1 << 1 };
enum { UCX_LOG_FATAL = 0, UCX_LOG_WARN = 2 };
enum { UCX_LOG_STOP = 0, UCX_LOG_CONTINUE = 1 };

typedef struct ucx_context ucx_context;
typedef struct ucx_config ucx_config;
typedef struct ucx_worker ucx_worker;
typedef struct ucx_listener ucx_listener;
typedef struct ucx_conn_request ucx_conn_request;
typedef struct ucx_ep ucx_ep;
typedef struct ucx_memory ucx_memory;
typedef struct ucx_rkey ucx_rkey;

typedef struct {
    uint64_t field_mask;
    uint64_t features;
    size_t request_size;
    void (*request_init)(void *);
    void (*request_cleanup)(void *);
    uint64_t tag_sender_mask;
    int mt_workers_shared;
    size_t estimated_num_eps;
} ucx_params;

typedef struct {
    uint64_t field_mask; /* 0: every default is what we want, nothing behind it is read */
} ucx_worker_params;

typedef struct {
    const struct sockaddr *address;
    socklen_t size;
} ucx_sock_addr;

typedef void (*ucx_conn_cb)(ucx_conn_request *request, void *arg);
typedef void (*ucx_err_cb)(void *arg, ucx_ep *ep, ucx_status status);
typedef void (*ucx_send_cb)(void *request, ucx_status status, void *user_data);

typedef struct {
    uint64_t field_mask;
    ucx_sock_addr sockaddr;
    struct {
        void (*cb)(ucx_ep *ep, void *arg);
        void *arg;
    } accept_handler;
    struct {
        ucx_conn_cb cb;
        void *arg;
    } conn_handler;
} ucx_listener_params;

typedef struct {
    uint64_t field_mask;
    struct sockaddr_storage sockaddr;
} ucx_listener_attr;

typedef struct {
    uint64_t field_mask;
    const void *address;
    int err_mode;
    struct {
        ucx_err_cb cb;
        void *arg;
    } err_handler;
    void *user_data;
    unsigned flags;
    ucx_sock_addr sockaddr;
    ucx_conn_request *conn_request;
} ucx_ep_params;

typedef struct {
    uint64_t field_mask;
    void *address;
    size_t length;
    unsigned flags;
    unsigned prot;
    int memory_type;
    const void *exported_memh_buffer;
} ucx_map_params;

typedef struct {
    uint32_t op_attr_mask;
    uint32_t flags;
    void *request;
    ucx_send_cb cb;
    uint64_t datatype;
    void *user_data;
    void *reply_buffer;
    int memory_type;
    void *recv_info;
    ucx_memory *memh;
} ucx_request_param;

typedef struct {
    uint64_t field_mask;
    char *debug_string;
    size_t debug_string_size;
    ucx_status status;
    int mem_type;
} ucx_request_attr;

typedef struct {
    const char *transport;
    const char *device;
} ucx_lane;

typedef struct {
    uint64_t field_mask;
    char name[32];
    struct sockaddr_storage local;
    struct sockaddr_storage remote;
    struct {
        ucx_lane *entries;
        unsigned count; /* in: room; out: how many there are */
        size_t entry_size;
    } lanes;
} ucx_ep_attr;

typedef struct {
    uint64_t recv_attr;
    ucx_ep *reply_ep;
} ucx_am_recv_param;

typedef ucx_status (*ucx_am_cb)(void *arg, const void *header, size_t header_length, void *data,
                              size_t length, const ucx_am_recv_param *param);

typedef struct {
    uint64_t field_mask;
    unsigned id;
    uint32_t flags;
    ucx_am_cb cb;
    void *arg;
} ucx_am_handler;

typedef int (*ucx_log_cb)(const char *file, unsigned line, const char *function, int level,
                          const void *component, const char *message, va_list arguments);

/* A returned request: null is done, the last 100 values are negative codes, the rest a request. */
static inline int ucx_is_error(const void *request)
{
    return (uintptr_t)request >= (uintptr_t)(intptr_t)UCX_ERR_LAST;
}

static inline ucx_status ucx_error_of(const void *request)
{
    return (ucx_status)(intptr_t)request;
}

#endif
