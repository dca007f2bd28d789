/* Find libucp's functions at run time, and keep the library's log out of the process's output.
 *
 * The library is never linked: it is opened from the path that Python chose, once a process, and
 * stays. Settings of a context are made in ucx_context.c. The one global thing is the log, which
 * libucs writes to stdout: a handler of ours takes warnings instead, unless somebody else opened
 * the library before us, whose business its log then is.
 */
#define _GNU_SOURCE /* RTLD_DEFAULT, dladdr */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "ucx_engine.h"

/* 1.13 and 1.15 ignore the settings of TCP that are handed to a context, among them the address family,
 * without which an IPv6 client can end a listening process. 1.17 takes them. */
enum { OLDEST_MINOR = 17 };

static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER;
static kvp_ucp table;
static bool loaded;
static void *opened;

static pthread_mutex_t warning_lock = PTHREAD_MUTEX_INITIALIZER;
static char warning[512];
static uint64_t warning_count;

static int take_log(const char *file, unsigned line, const char *function, int level,
                    const void *component, const char *message, va_list arguments)
{
    (void)file;
    (void)line;
    (void)function;
    (void)component;
    if (level == UCX_LOG_FATAL) {
        return UCX_LOG_CONTINUE; /* the process is about to end: let it say why */
    }
    if (level <= UCX_LOG_WARN) {
        pthread_mutex_lock(&warning_lock);
        vsnprintf(warning, sizeof(warning), message, arguments);
        warning_count++;
        pthread_mutex_unlock(&warning_lock);
    }
    return UCX_LOG_STOP;
}

uint64_t kvp_ucx_last_warning(char *text, size_t text_size)
{
    pthread_mutex_lock(&warning_lock);
    snprintf(text, text_size, "%s", warning);
    uint64_t count = warning_count;
    pthread_mutex_unlock(&warning_lock);
    return count;
}

static const char *resolve(void *library, kvp_ucp *ucp)
{
    /* ISO C has no cast from dlsym's result to a function; POSIX promises that the bytes are one. */
#define KVP_RESOLVE(result, name, arguments)                                                       \
    {                                                                                              \
        void *symbol = dlsym(library, "ucp_" #name);                                               \
        if (symbol == NULL) {                                                                      \
            return "ucp_" #name;                                                                   \
        }                                                                                          \
        memcpy(&ucp->name, &symbol, sizeof(symbol));                                               \
    }
    KVP_UCP_FUNCTIONS(KVP_RESOLVE)
#undef KVP_RESOLVE
    return NULL;
}

static void take_over_log(void *library)
{
    void (*push_handler)(ucx_log_cb handler);
    void *symbol = dlsym(library, "ucs_log_push_handler");
    if (symbol != NULL) {
        memcpy(&push_handler, &symbol, sizeof(symbol));
        push_handler(take_log);
    }
}

/* Whether another libucp than the one of `path` offers its symbols to the whole process. They would
 * take the place of ours inside our own libraries: seen as a transfer that never ends. */
static bool is_mixed_up(const char *path, void *before, char *reason, size_t reason_size)
{
    const void *global = dlsym(RTLD_DEFAULT, "ucp_worker_create");
    if (global == NULL || (before != NULL && global == dlsym(before, "ucp_worker_create"))) {
        return false;
    }
    Dl_info other;
    const char *name = dladdr(global, &other) != 0 ? other.dli_fname : "unknown";
    snprintf(reason, reason_size,
             "%s is loaded with global symbols (RTLD_GLOBAL) and would mix with %s: load it without,"
             " or use the same one for both", name, path);
    return true;
}

static bool load(const char *path, char *reason, size_t reason_size)
{
    void *before = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (is_mixed_up(path, before, reason, reason_size)) {
        if (before != NULL) {
            dlclose(before);
        }
        return false;
    }
    /* RTLD_NODELETE: the library leaves threads' data and hooks behind that outlive a dlclose. */
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (before != NULL) {
        dlclose(before);
    }
    if (library == NULL) {
        snprintf(reason, reason_size, "%s", dlerror());
        return false;
    }
    const char *missing = resolve(library, &table);
    if (missing != NULL) {
        snprintf(reason, reason_size, "%s has no %s", path, missing);
        dlclose(library);
        return false;
    }
    table.get_version(&table.major, &table.minor, &table.release);
    if (table.major != UCX_API_MAJOR || table.minor < OLDEST_MINOR) {
        snprintf(reason, reason_size, "UCX %u.%u is older than %d.%d or another generation",
                 table.major, table.minor, UCX_API_MAJOR, OLDEST_MINOR);
        dlclose(library);
        return false;
    }
    if (before == NULL) {
        take_over_log(library);
    }
    opened = library;
    return true;
}

const kvp_ucp *kvp_ucp_load(const char *path, char *reason, size_t reason_size)
{
    pthread_mutex_lock(&load_lock);
    if (!loaded) {
        loaded = load(path, reason, reason_size);
    } else {
        void *again = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
        if (again != NULL) {
            dlclose(again);
        }
        if (again != opened) {
            snprintf(reason, reason_size, "another libucp is already in use in this process");
            pthread_mutex_unlock(&load_lock);
            return NULL;
        }
    }
    const kvp_ucp *result = loaded ? &table : NULL;
    pthread_mutex_unlock(&load_lock);
    return result;
}
