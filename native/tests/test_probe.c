/* probe.c: what the kernel says is passed on, and no descriptor stays open. */
#include "../src/probe.c"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "check.h"

static int next_descriptor(void)
{
    int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0);
    close(fd);
    return fd;
}

/* Refuse the call in this process, as containers do. */
static void refuse_io_uring(int reason)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (uint32_t)reason),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof(code) / sizeof(code[0]), .filter = code};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

static void test_refused(int reason)
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        refuse_io_uring(reason);
        errno = 0;
        CHECK(kvp_probe_io_uring() == KVP_SYSTEM && errno == reason);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void test_here(void)
{
    int before = next_descriptor();
    for (int i = 0; i < 100; i++) {
        errno = 0;
        kvp_status status = kvp_probe_io_uring();
        CHECK(status == KVP_OK || (status == KVP_SYSTEM && errno != 0));
    }
    CHECK(next_descriptor() == before);
}

int main(void)
{
    test_here();
    test_refused(EPERM);
    test_refused(ENOSYS);
    return 0;
}
