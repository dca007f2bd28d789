"""The UCX engine in C: its ABI against the wheel's headers, and two engines under sanitizers."""

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvpool.transfer.ucx_library import find_library
from tests.conftest import Count
from tests.native.test_native import ADDRESS, INCLUDE, NATIVE, STRICT, THREAD, gcc

pytestmark = pytest.mark.ucx

# The engine, and what reads need: arenas with their ledgers, and copies that are checked.
SOURCES = [
    *sorted((NATIVE / "src").glob("ucx_*.c")),
    *sorted((NATIVE / "src").glob("ledger*.c")),
    *(NATIVE / "src" / f"{name}.c" for name in ("arena", "copy", "crc32c", "crew", "memfd")),
]
FLAGS = {"address": ADDRESS, "thread": THREAD}


def test_declarations_are_the_librarys(tmp_path: Path) -> None:
    wheel = find_spec("libucx")
    if wheel is None or wheel.submodule_search_locations is None:
        pytest.skip("the headers of the libucx wheel are not installed")
    headers = Path(wheel.submodule_search_locations[0], "include")
    check = NATIVE / "tests" / "ucp_abi_check.c"
    gcc("-std=gnu11", f"-I{headers}", "-c", check, "-o", tmp_path / "check.o")


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Compile the sources once for each sanitizer."""
    made: dict[str, list[Path]] = {}
    for name, flags in FLAGS.items():
        folder = tmp_path_factory.mktemp(name)
        made[name] = [folder / f"{source.stem}.o" for source in SOURCES]
        for source, out in zip(SOURCES, made[name], strict=True):
            gcc(*STRICT, *flags, INCLUDE, "-c", source, "-o", out)
    return made


def run(
    name: str, sanitizer: str, objects: dict[str, list[Path]], folder: Path, *arguments: str
) -> str:
    """Build and run a program of native/tests under a sanitizer; return what it said."""
    program, source = folder / "program", NATIVE / "tests" / f"{name}.c"
    flags = [*STRICT, *FLAGS[sanitizer], INCLUDE]
    gcc(*flags, source, *objects[sanitizer], "-o", program, "-lpthread", "-ldl")
    # UCX rewrites madvise() to a hook of its own, which runs at a thread's end, after
    # ThreadSanitizer has let go of the thread.
    environment = os.environ | {"UCX_MEM_EVENTS": "n"}
    done = subprocess.run(
        [program, find_library(), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("sanitizer", FLAGS)
def test_two_engines(sanitizer: str, objects: dict[str, list[Path]], tmp_path: Path) -> None:
    assert "zero-copy" in run("ucx_engine", sanitizer, objects, tmp_path)


def test_cuts(objects: dict[str, list[Path]], tmp_path: Path) -> None:
    run("ucx_cuts", "address", objects, tmp_path)


@pytest.mark.parametrize("sanitizer", FLAGS)
def test_reads_and_what_lies_about_them(
    sanitizer: str, objects: dict[str, list[Path]], tmp_path: Path, count: Count
) -> None:
    run("ucx_reads", sanitizer, objects, tmp_path, str(count(30, 300)))
