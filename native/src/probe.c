/* What the kernel allows this process, found by asking for it. Nothing is left behind. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kvpool.h"

#ifndef SYS_io_uring_setup
#define SYS_io_uring_setup 425 /* Linux 5.1, newer than some libc headers; the same on every CPU */
#endif

/* struct io_uring_params is 120 bytes, all of which may be 0; its header may be missing too. */
enum { PARAMS_WORDS = 120 / sizeof(uint32_t) };

kvp_status kvp_probe_io_uring(void)
{
    uint32_t params[PARAMS_WORDS] = {0};
    long fd = syscall(SYS_io_uring_setup, 1U, params);
    if (fd < 0)
        return KVP_SYSTEM;
    close((int)fd);
    return KVP_OK;
}
