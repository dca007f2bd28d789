"""Mooncake's store as a reference: its master, its memory and its client, in processes of their own.

Owns these processes, and how they are asked. Who calls it: ``bench_server``.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Final

from kvpool.cli.bench_peers import environment, interpreter, said
from kvpool.cli.bench_ucx import Child

_ROOT: Final = Path(__file__).resolve().parents[2]
_JOB: Final = _ROOT / "benchmarks" / "peers" / "store.py"


class Mooncake:
    """A client of Mooncake's store, and the memory that it uses.

    Args:
        stack: Ends its processes.
        buffer_bytes: What one sample puts or gets.
        memory_bytes: What the pool has.
        apart: Whether the memory is another process's.
        pooled: Whether connections are kept, which is not Mooncake's default.
    """

    def __init__(
        self, stack: ExitStack, buffer_bytes: int, memory_bytes: int, *, apart: bool, pooled: bool
    ) -> None:
        python = interpreter("mooncake")
        told = environment(python)
        if pooled:
            told |= {"MC_TCP_ENABLE_CONNECTION_POOL": "1"}
        held = memory_bytes if apart else 0
        master = said(Child(stack, python, _JOB, "hold", held, environment=told), "")
        own = memory_bytes - held
        self._client = Child(
            stack, python, _JOB, "use", buffer_bytes, master, own, environment=told
        )
        said(self._client, "")

    def seconds(self, call: str, *numbers: int) -> float:
        """Make one call of ``benchmarks/peers/store.py``; return the seconds that it took."""
        return float(said(self._client, " ".join([call, *map(str, numbers)])))
