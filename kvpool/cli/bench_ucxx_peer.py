"""Both processes of the row that reads through kvpool's transport over ucxx.

Owns nothing but its memory; answers until its standard input ends. UCX talks on standard output, so
lines for the caller begin with ``SAID``. Who calls it: ``bench_peers``, with the Python that has ucxx,
as ``python -m kvpool.cli.bench_ucxx_peer blocks|read MEMORY OPERATION LAYERS``.
"""

import json
import sys
import time
from typing import Final

from kvpool.cli.bench_ucx import Reader, Scale
from kvpool.cli.bench_ucx_peer import offer_blocks
from kvpool.transfer.ucxpy import UcxxTransport

SAID: Final = "kvpool:"


def blocks(memory_bytes: int, layers: int) -> None:
    """Be read from."""
    # ucxx listens on every interface while this runs.
    with UcxxTransport("bench-owner", trusted_network=True) as transport:
        say(json.dumps(offer_blocks(transport, "ucxx://127.0.0.1:0", memory_bytes, layers)))
        sys.stdin.read()


def read(scale: Scale, layers: int) -> None:
    """Take a line of where the blocks are; then, for each line, read once and say GB/s."""
    with UcxxTransport("bench-reader") as transport:
        reader = Reader(transport, sys.stdin.readline(), layers, scale, time.perf_counter)
        say("ready")
        for _ in sys.stdin:
            say(f"{reader.rate():.9f}")


def say(line: str) -> None:
    """Print a line for the caller."""
    print(SAID + line, flush=True)


if __name__ == "__main__":
    memory, operation, deep = map(int, sys.argv[2:5])
    if sys.argv[1] == "blocks":
        blocks(memory, deep)
    else:
        read(Scale(operation, memory, 0, 0.0), deep)
