"""The UCX engine in C: its ABI against the wheel's headers, and two engines under sanitizers."""

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvpool.transfer.ucx_library import find_library
from tests.native.test_native import ADDRESS, INCLUDE, NATIVE, STRICT, THREAD, gcc

pytestmark = pytest.mark.ucx

SOURCES = sorted((NATIVE / "src").glob("ucx_*.c"))
PROGRAM = NATIVE / "tests" / "ucx_engine.c"


def test_declarations_are_the_librarys(tmp_path: Path) -> None:
    wheel = find_spec("libucx")
    if wheel is None or wheel.submodule_search_locations is None:
        pytest.skip("the headers of the libucx wheel are not installed")
    headers = Path(wheel.submodule_search_locations[0], "include")
    check = NATIVE / "tests" / "ucp_abi_check.c"
    gcc("-std=gnu11", f"-I{headers}", "-c", check, "-o", tmp_path / "check.o")


@pytest.mark.parametrize("flags", [ADDRESS, THREAD], ids=["address", "thread"])
def test_two_engines(flags: list[str], tmp_path: Path) -> None:
    program = tmp_path / "program"
    gcc(*STRICT, *flags, INCLUDE, *SOURCES, PROGRAM, "-o", program, "-lpthread", "-ldl")
    # UCX rewrites madvise() to a hook of its own, which runs at a thread's end, after
    # ThreadSanitizer has let go of the thread.
    environment = os.environ | {"UCX_MEM_EVENTS": "n"}
    done = subprocess.run(
        [program, find_library()],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "zero-copy" in done.stdout
