/* Compares native/src/ucp_abi.h with UCX's own headers. Only compiled, never run; where the headers
 * of the libucx wheel are installed (tests/native/test_ucx_engine.py). */
#include <ucp/api/ucp.h>
#include <ucs/debug/log_def.h>

#include "../src/ucp_abi.h"

#define SAME(ours, theirs) _Static_assert((long long)(ours) == (long long)(theirs), #theirs)
#define FIELD(ours, our_field, theirs, their_field)                                                \
    SAME(offsetof(ours, our_field), offsetof(theirs, their_field));                                \
    SAME(sizeof(((ours *)0)->our_field), sizeof(((theirs *)0)->their_field))

SAME(sizeof(ucx_status), sizeof(ucs_status_t));
SAME(UCX_OK, UCS_OK);
SAME(UCX_ERR_LAST, UCS_ERR_LAST);

SAME(UCX_PARAM_FEATURES, UCP_PARAM_FIELD_FEATURES);
SAME(UCX_FEATURE_RMA, UCP_FEATURE_RMA);
SAME(UCX_FEATURE_WAKEUP, UCP_FEATURE_WAKEUP);
SAME(UCX_FEATURE_AM, UCP_FEATURE_AM);
FIELD(ucx_params, field_mask, ucp_params_t, field_mask);
FIELD(ucx_params, features, ucp_params_t, features);

FIELD(ucx_worker_params, field_mask, ucp_worker_params_t, field_mask);

SAME(UCX_LISTENER_SOCK_ADDR, UCP_LISTENER_PARAM_FIELD_SOCK_ADDR);
SAME(UCX_LISTENER_CONN_HANDLER, UCP_LISTENER_PARAM_FIELD_CONN_HANDLER);
SAME(sizeof(ucx_sock_addr), sizeof(ucs_sock_addr_t));
FIELD(ucx_sock_addr, address, ucs_sock_addr_t, addr);
FIELD(ucx_sock_addr, size, ucs_sock_addr_t, addrlen);
SAME(sizeof(ucx_listener_params), sizeof(ucp_listener_params_t));
FIELD(ucx_listener_params, field_mask, ucp_listener_params_t, field_mask);
FIELD(ucx_listener_params, sockaddr, ucp_listener_params_t, sockaddr);
FIELD(ucx_listener_params, conn_handler.cb, ucp_listener_params_t, conn_handler.cb);
FIELD(ucx_listener_params, conn_handler.arg, ucp_listener_params_t, conn_handler.arg);
SAME(UCX_LISTENER_ATTR_SOCKADDR, UCP_LISTENER_ATTR_FIELD_SOCKADDR);
SAME(sizeof(ucx_listener_attr), sizeof(ucp_listener_attr_t));
FIELD(ucx_listener_attr, sockaddr, ucp_listener_attr_t, sockaddr);

SAME(UCX_EP_ATTR_TRANSPORTS, UCP_EP_ATTR_FIELD_TRANSPORTS);
SAME(UCX_EP_ATTR_REMOTE, UCP_EP_ATTR_FIELD_REMOTE_SOCKADDR);
FIELD(ucx_ep_attr, lanes, ucp_ep_attr_t, transports);
SAME(offsetof(ucx_ep_attr, lanes.count), offsetof(ucp_ep_attr_t, transports.num_entries));
SAME(offsetof(ucx_ep_attr, lanes.entry_size), offsetof(ucp_ep_attr_t, transports.entry_size));
SAME(sizeof(ucx_lane), sizeof(ucp_transport_entry_t));
SAME(UCX_EP_ERR_MODE, UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE);
SAME(UCX_EP_ERR_HANDLER, UCP_EP_PARAM_FIELD_ERR_HANDLER);
SAME(UCX_EP_SOCK_ADDR, UCP_EP_PARAM_FIELD_SOCK_ADDR);
SAME(UCX_EP_FLAGS, UCP_EP_PARAM_FIELD_FLAGS);
SAME(UCX_EP_CONN_REQUEST, UCP_EP_PARAM_FIELD_CONN_REQUEST);
SAME(UCX_EP_CLIENT_SERVER, UCP_EP_PARAMS_FLAGS_CLIENT_SERVER);
SAME(UCX_EP_CLOSE_FORCE, UCP_EP_CLOSE_FLAG_FORCE);
SAME(UCX_ERR_MODE_PEER, UCP_ERR_HANDLING_MODE_PEER);
FIELD(ucx_ep_params, field_mask, ucp_ep_params_t, field_mask);
FIELD(ucx_ep_params, err_mode, ucp_ep_params_t, err_mode);
FIELD(ucx_ep_params, err_handler.cb, ucp_ep_params_t, err_handler.cb);
FIELD(ucx_ep_params, err_handler.arg, ucp_ep_params_t, err_handler.arg);
FIELD(ucx_ep_params, flags, ucp_ep_params_t, flags);
FIELD(ucx_ep_params, sockaddr, ucp_ep_params_t, sockaddr);
FIELD(ucx_ep_params, conn_request, ucp_ep_params_t, conn_request);

SAME(UCX_MAP_ADDRESS, UCP_MEM_MAP_PARAM_FIELD_ADDRESS);
SAME(UCX_MAP_LENGTH, UCP_MEM_MAP_PARAM_FIELD_LENGTH);
SAME(UCX_MAP_PROT, UCP_MEM_MAP_PARAM_FIELD_PROT);
SAME(UCX_PROT_LOCAL_READ, UCP_MEM_MAP_PROT_LOCAL_READ);
SAME(UCX_PROT_LOCAL_WRITE, UCP_MEM_MAP_PROT_LOCAL_WRITE);
SAME(UCX_PROT_REMOTE_WRITE, UCP_MEM_MAP_PROT_REMOTE_WRITE);
SAME(UCX_PROT_REMOTE_READ, UCP_MEM_MAP_PROT_REMOTE_READ);
FIELD(ucx_map_params, field_mask, ucp_mem_map_params_t, field_mask);
FIELD(ucx_map_params, address, ucp_mem_map_params_t, address);
FIELD(ucx_map_params, length, ucp_mem_map_params_t, length);
FIELD(ucx_map_params, prot, ucp_mem_map_params_t, prot);

SAME(UCX_OP_CALLBACK, UCP_OP_ATTR_FIELD_CALLBACK);
SAME(UCX_OP_USER_DATA, UCP_OP_ATTR_FIELD_USER_DATA);
SAME(UCX_OP_FLAGS, UCP_OP_ATTR_FIELD_FLAGS);
SAME(UCX_OP_NO_IMM_CMPL, UCP_OP_ATTR_FLAG_NO_IMM_CMPL);
FIELD(ucx_request_param, op_attr_mask, ucp_request_param_t, op_attr_mask);
FIELD(ucx_request_param, flags, ucp_request_param_t, flags);
FIELD(ucx_request_param, cb, ucp_request_param_t, cb.send);
FIELD(ucx_request_param, user_data, ucp_request_param_t, user_data);

SAME(UCX_REQUEST_INFO, UCP_REQUEST_ATTR_FIELD_INFO_STRING);
SAME(UCX_REQUEST_INFO_SIZE, UCP_REQUEST_ATTR_FIELD_INFO_STRING_SIZE);
SAME(sizeof(ucx_request_attr), sizeof(ucp_request_attr_t));
FIELD(ucx_request_attr, debug_string, ucp_request_attr_t, debug_string);
FIELD(ucx_request_attr, debug_string_size, ucp_request_attr_t, debug_string_size);

SAME(UCX_AM_SEND_REPLY, UCP_AM_SEND_FLAG_REPLY);
SAME(UCX_AM_SEND_EAGER, UCP_AM_SEND_FLAG_EAGER);
SAME(UCX_AM_RECV_REPLY_EP, UCP_AM_RECV_ATTR_FIELD_REPLY_EP);
SAME(UCX_AM_RECV_RNDV, UCP_AM_RECV_ATTR_FLAG_RNDV);
FIELD(ucx_am_recv_param, recv_attr, ucp_am_recv_param_t, recv_attr);
FIELD(ucx_am_recv_param, reply_ep, ucp_am_recv_param_t, reply_ep);
SAME(UCX_AM_HANDLER_ID, UCP_AM_HANDLER_PARAM_FIELD_ID);
SAME(UCX_AM_HANDLER_CB, UCP_AM_HANDLER_PARAM_FIELD_CB);
SAME(UCX_AM_HANDLER_ARG, UCP_AM_HANDLER_PARAM_FIELD_ARG);
SAME(sizeof(ucx_am_handler), sizeof(ucp_am_handler_param_t));
FIELD(ucx_am_handler, id, ucp_am_handler_param_t, id);
FIELD(ucx_am_handler, cb, ucp_am_handler_param_t, cb);
FIELD(ucx_am_handler, arg, ucp_am_handler_param_t, arg);

SAME(UCX_LOG_FATAL, UCS_LOG_LEVEL_FATAL);
SAME(UCX_LOG_WARN, UCS_LOG_LEVEL_WARN);
SAME(UCX_LOG_STOP, UCS_LOG_FUNC_RC_STOP);
SAME(UCX_LOG_CONTINUE, UCS_LOG_FUNC_RC_CONTINUE);

/* Signatures. With the library's names for its types, a function of our table's type must take the
 * library's own declaration: same count, order and width of arguments. Incompatible ones do not
 * compile; types that differ only by name are declared the same here. */
SAME(UCX_API_MAJOR, UCP_API_MAJOR);
_Static_assert(UCX_API_MINOR <= UCP_API_MINOR, "the headers are older than the API we ask for");

#define ucx_context struct ucp_context
#define ucx_config ucp_config_t
#define ucx_worker struct ucp_worker
#define ucx_listener struct ucp_listener
#define ucx_conn_request struct ucp_conn_request
#define ucx_ep struct ucp_ep
#define ucx_memory struct ucp_mem
#define ucx_rkey struct ucp_rkey
#define ucx_status ucs_status_t
#define ucx_params ucp_params_t
#define ucx_worker_params ucp_worker_params_t
#define ucx_am_handler ucp_am_handler_param_t
#define ucx_listener_params ucp_listener_params_t
#define ucx_listener_attr ucp_listener_attr_t
#define ucx_ep_params ucp_ep_params_t
#define ucx_map_params ucp_mem_map_params_t
#define ucx_request_param ucp_request_param_t
#define ucx_request_attr ucp_request_attr_t
#define ucx_ep_attr ucp_ep_attr_t
#include "../src/ucx_load.h"
#define COMPATIBLE(result, name, arguments)                                                        \
    _Static_assert(__builtin_types_compatible_p(__typeof__(ucp_##name), result arguments),         \
                   "ucp_" #name " has another signature");
KVP_UCP_FUNCTIONS(COMPATIBLE)
