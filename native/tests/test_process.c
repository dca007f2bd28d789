/* process.c: a grandchild gets the signal when the child that asked dies. */
#include "../src/process.c"

#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static void test_refusals(void)
{
    CHECK(kvp_die_with_parent(0) == KVP_INVALID);
    CHECK(kvp_die_with_parent(-1) == KVP_INVALID);
    CHECK(kvp_die_with_parent(1000) == KVP_INVALID);
}

static void test_dies(void)
{
    /* The grandchild holds the pipe's only writing end: end of file says that it is dead. */
    int alive[2], asked[2];
    CHECK(pipe(alive) == 0 && pipe(asked) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        if (fork() == 0) {
            char byte = kvp_die_with_parent(SIGKILL) == KVP_OK;
            CHECK(write(asked[1], &byte, 1) == 1);
            for (;;)
                pause();
        }
        close(alive[1]);
        char byte = 0;
        CHECK(read(asked[0], &byte, 1) == 1 && byte == 1);
        _exit(0);
    }
    close(alive[1]);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    char byte;
    CHECK(read(alive[0], &byte, 1) == 0);
}

int main(void)
{
    test_refusals();
    test_dies();
    return 0;
}
