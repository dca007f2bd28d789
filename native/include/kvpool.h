/* What every C source of kvpool includes: the declarations that Python sees, and the C library's
 * types they are made of. The api files hold no preprocessor line: cffi parses them. */
#ifndef KVPOOL_H
#define KVPOOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvpool_api.h"
#include "kvpool_ucx_api.h"
#include "kvpool_ssd_api.h"

#endif
