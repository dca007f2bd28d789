"""Try one UCX library: open it, connect over loopback, put a block, and say what came of it.

``python -m kvpool.cli.doctor_ucx PATH`` prints one JSON object. It is a process of its own because
a process can hold one libucp only, and because a library that does not fit may end its process. Who
calls it: ``kvpool doctor``, through ``attempt``.
"""

import mmap
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from kvpool.errors import KVPoolError
from kvpool.memory import Span
from kvpool.transfer.ucx_engine import UcxEngine
from kvpool.transfer.ucx_library import modules_beside
from kvpool.transfer.ucx_native import TRIAL_BYTES

_TIMEOUT_S: Final = 10.0
_PUT_BYTES: Final = 1 << 20
_MAPPED: Final = re.compile(r"\s(/\S*/libucp\S*\.so\S*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxLibrary:
    """A libucp, and what came of trying it.

    Attributes:
        path: Where it is; a bare name if the loader did not find it.
        why: Why kvpool loads this one; empty for one that it does not load.
        version: As the library says it; empty if it cannot be opened.
        problem: Why it cannot be used; empty if it can.
        put_protocol: How it carries large puts over TCP, in its own words: it is asked of one.
        modules: Names of the transports that lie beside it, such as ``cma`` and ``ib``. TCP and
            shared memory are built in and have no file.
    """

    path: str
    why: str = ""
    version: str = ""
    problem: str = ""
    put_protocol: str = ""
    modules: tuple[str, ...] = ()


def attempt(path: str, why: str = "", timeout_s: float = 3 * _TIMEOUT_S) -> UcxLibrary:
    """Try a library in a process of its own. Never raises, and ends within ``timeout_s``.

    Args:
        path: The libucp, or a bare name for the loader to find.
        why: Passed on.
        timeout_s: When the process is killed.
    """
    command = [sys.executable, "-P", "-m", "kvpool.cli.doctor_ucx", path]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return UcxLibrary(path=path, why=why, problem=f"no answer within {timeout_s:g} s")
    try:
        found = msgspec.json.decode(done.stdout.splitlines()[-1], type=UcxLibrary)
    except (IndexError, msgspec.DecodeError):
        said = done.stderr.strip().splitlines()[-1:] or ["nothing"]
        ended = f"its process ended with {done.returncode} and said: {said[0]}"
        return UcxLibrary(path=path, why=why, problem=ended)
    return replace(found, why=why)


def _try(path: str) -> UcxLibrary:
    inbox = Span.of(np.frombuffer(mmap.mmap(-1, _PUT_BYTES + TRIAL_BYTES), dtype=np.uint8))
    block = Span.of(np.ones(_PUT_BYTES, dtype=np.uint8))
    with (
        UcxEngine(inbox=inbox, endpoint_max=1, library=path, trial=True) as server,
        UcxEngine(endpoint_max=1, library=path) as client,
    ):
        counts = client.counts()
        version = ".".join(str(counts[f"ucx_{part}"]) for part in ("major", "minor", "release"))
        # What is mapped now is what the loader made of a bare name.
        mapped = _MAPPED.search(Path("/proc/self/maps").read_text())
        where = Path(mapped[1] if mapped is not None else path)
        found = UcxLibrary(path=str(where), modules=modules_beside(where))
        try:
            port = server.listen(lambda endpoint: None)
            with client.connect("127.0.0.1", port, _TIMEOUT_S, server.incarnation) as endpoint:
                endpoint.put([(block, 0)], _TIMEOUT_S).wait(_TIMEOUT_S)
        except KVPoolError as error:
            return replace(found, version=version, problem=str(error))
        landed = bytes(inbox.view()[:_PUT_BYTES]) == bytes(block.view())
        problem = "" if landed else "what was put is not what arrived"
        return replace(found, version=version, problem=problem, put_protocol=client.put_protocol())


def main() -> None:
    """Print what came of the library that the command line names."""
    path = sys.argv[1]
    try:
        found = _try(path)
    except KVPoolError as error:
        found = UcxLibrary(path=path, modules=_modules_of(path), problem=str(error))
    print(msgspec.json.encode(found).decode())


def _modules_of(path: str) -> tuple[str, ...]:
    return modules_beside(Path(path)) if "/" in path else ()


if __name__ == "__main__":
    main()
