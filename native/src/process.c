/* What a process asks of the kernel about its own life. */
#include <signal.h>
#include <sys/prctl.h>

#include "kvpool.h"

kvp_status kvp_die_with_parent(int signal_number)
{
    if (signal_number < 1 || signal_number >= NSIG)
        return KVP_INVALID;
    if (prctl(PR_SET_PDEATHSIG, (unsigned long)signal_number, 0UL, 0UL, 0UL) != 0)
        return KVP_SYSTEM;
    return KVP_OK;
}
