"""Describe the C core to cffi."""

from pathlib import Path

from cffi import FFI

# setuptools runs this file with the repository root as its working directory, and cffi wants
# paths relative to it.
HERE = Path("native")

ffibuilder = FFI()
for header in ("kvpool_api.h", "kvpool_ucx_api.h", "kvpool_ssd_api.h"):
    ffibuilder.cdef((HERE / "include" / header).read_text())
ffibuilder.set_source(
    "kvpool._native",
    '#include "kvpool.h"',
    sources=[str(path) for path in sorted((HERE / "src").glob("*.c"))],
    # A changed header rebuilds everything.
    depends=[str(path) for path in sorted((HERE / "include").glob("*.h"))],
    include_dirs=[str(HERE / "include")],
    libraries=["pthread", "dl"],
    # Warnings are no errors here, where a user's newer compiler may have new ones: the tests build
    # every source with stricter warnings, as errors.
    # kvpool._native exports nothing but its initialiser, so that no other library of the process
    # can take the place of a kvp_ function.
    extra_compile_args=[
        "-std=gnu11",
        "-Wall",
        "-Wextra",
        "-Wshadow",
        "-O3",
        "-fvisibility=hidden",
    ],
)
