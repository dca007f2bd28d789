"""Describe the C core to cffi."""

from pathlib import Path

from cffi import FFI

# setuptools runs this file with the repository root as its working directory, and cffi wants
# paths relative to it.
HERE = Path("native")

ffibuilder = FFI()
ffibuilder.cdef((HERE / "include" / "kvpool_api.h").read_text())
ffibuilder.set_source(
    "kvpool._native",
    '#include "kvpool.h"',
    sources=[str(path) for path in sorted((HERE / "src").glob("*.c"))],
    include_dirs=[str(HERE / "include")],
    libraries=["pthread", "dl"],
    extra_compile_args=["-std=gnu11", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-O3"],
)
