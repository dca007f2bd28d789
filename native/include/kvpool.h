/* What every C source of kvpool includes: the declarations that Python sees, and the C library's
 * types they are made of. kvpool_api.h itself holds no preprocessor line: cffi parses it. */
#ifndef KVPOOL_H
#define KVPOOL_H

#include <stddef.h>
#include <stdint.h>

#include "kvpool_api.h"

#endif
