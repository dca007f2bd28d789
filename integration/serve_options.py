"""What the command line of ``kvpool-serve`` says.

Owns its flags, their defaults and their help. Who calls it: serve.py.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpool.config import RuntimeConfig, parse_size
from kvpool.errors import ConfigError, UsageError
from kvpool.transfer.choice import TRANSPORT_KINDS, TransportKind

# More workers of a role than this are a slip of the finger.
WORKERS_MAX: Final = 64

_EPILOG: Final = """\
examples:
  kvpool-serve                                   the demo model, SmolLM2-135M-Instruct
  kvpool-serve --model ./Llama-3.2-1B --port 9000
  kvpool-serve --dram 8GiB                       keep more KV blocks between requests
  kvpool-serve --ssd ./kv --ssd-bytes 100GiB     keep them over restarts, too
  kvpool-serve --prefill 2 --decode 2            more workers, that share the processors

Prompts are computed by prefill processes, streamed layer by layer to decode processes, and kept in
a pool process, where later prompts that begin alike find them (usage.prompt_tokens_details
.cached_tokens in the answers). A request goes to the least loaded worker that answers; a process
that dies is started again. /health says how the processes are, /metrics counts.
The API has no authentication: keep --host on loopback unless the network is trusted.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What the command line says.

    Attributes:
        runtime: Settings of the whole.
        cache_dir: Where the demo's converted model is kept.
        run_dir: Folder of the sockets; None makes one.
        trace_dir: Where workers write their events; None writes none.
        die_with: The parent without which it stops, or None.
        outbox_bytes: Staging of layer slices in each prefill worker.
        threads: Threads that compute, in each worker.
        prefill, decode: How many workers of each role.
        transport: How KV blocks travel between the processes.
        ucx_library: Path of the libucp to load; ``""``: chosen.
        ssd: Folder of the pool's SSD tier; None means none.
        ssd_bytes: Room that it takes there.
    """

    runtime: RuntimeConfig
    cache_dir: Path
    run_dir: Path | None
    trace_dir: Path | None
    die_with: int | None
    outbox_bytes: int
    threads: int
    prefill: int
    decode: int
    transport: TransportKind
    ucx_library: str
    ssd: Path | None
    ssd_bytes: int

    @property
    def workers(self) -> dict[str, str]:
        """Role of each worker, by its name: p0, p1, .. and d0, d1, ..."""
        prefill = {f"p{number}": "prefill" for number in range(self.prefill)}
        return prefill | {f"d{number}": "decode" for number in range(self.decode)}


def make_parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    defaults = RuntimeConfig()
    parser = argparse.ArgumentParser(
        prog="kvpool-serve",
        description="Serve a language model behind the OpenAI HTTP API, with a pool of KV blocks.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def option(name: str, default: object, text: str, kind: type = str) -> None:
        parser.add_argument(name, default=default, type=kind, help=f"{text} (default: {default})")

    parser.add_argument(
        "--model", default="", help="a model's folder (default: SmolLM2-135M-Instruct, a demo)"
    )
    option("--host", defaults.host, "address to listen at")
    option("--port", defaults.port, "port to listen at; 0 picks a free one", int)
    option("--prefill", 1, "prefill workers: each computes one prompt at a time", int)
    option("--decode", 1, "decode workers: each runs many requests at a time", int)
    option("--device", defaults.device, "torch device to compute on")
    option("--dtype", defaults.dtype, "of weights, compute and KV; on a CPU float32 is fastest")
    option("--dram", "1GiB", "memory of the pool, kept between requests")
    parser.add_argument(
        "--ssd", type=Path, metavar="DIR", help="keep blocks in this folder, over restarts"
    )
    parser.add_argument(
        "--ssd-bytes", default="", metavar="SIZE", help="room that is taken in it, such as 100GiB"
    )
    option("--kv-bytes", "512MiB", "KV memory of each worker: what runs at a time")
    option("--block-tokens", defaults.block_tokens, "tokens of a block, a multiple of 16", int)
    option("--chunk-tokens", defaults.chunk_tokens, "most prompt tokens in one forward", int)
    option("--running-max", defaults.running_max, "most requests in one decode step", int)
    parser.add_argument(
        "--threads",
        type=int,
        help="threads that compute, in each worker (default: the processors, shared by all workers)",
    )
    option("--outbox-bytes", "64MiB", "staging of layers on their way to decode workers")
    option("--request-timeout-s", defaults.request_timeout_s, "longest life of a request", float)
    option("--cache-dir", Path.home() / ".cache" / "kvpool", "where the demo model is kept", Path)
    parser.add_argument(
        "--transport",
        choices=TRANSPORT_KINDS,
        default="host",
        help="how KV blocks travel between the processes: host is shared memory; ucx is TCP on"
        " loopback, where any user of this machine who connects could write to the processes'"
        " memory (default: %(default)s)",
    )
    parser.add_argument(
        "--ucx-library",
        default="",
        metavar="PATH",
        help="the libucp to load (default: chosen; kvpool doctor says which, and why)",
    )
    parser.add_argument("--run-dir", type=Path, help="folder of the sockets (default: a fresh one)")
    parser.add_argument(
        "--die-with", type=int, metavar="PID", help="stop when this process, the parent, dies"
    )
    parser.add_argument("--trace-dir", type=Path, help="write the workers' events here")
    return parser


def default_threads(workers: int) -> int:
    """Return the share of the processors that each worker gets: all compute at the same time."""
    return max(1, len(os.sched_getaffinity(0)) // workers)


def parse_arguments(argv: Sequence[str] | None) -> ServeOptions:
    """Read the command line. Raises ConfigError, or exits with 2 as argparse does."""
    options = make_parser().parse_args(argv)
    for role in ("prefill", "decode"):
        count = getattr(options, role)
        if not 1 <= count <= WORKERS_MAX:
            raise ConfigError(f"--{role} is {count}: use 1 to {WORKERS_MAX} workers", key=role)
    if not options.host:
        raise ConfigError(
            "--host is empty: use 127.0.0.1, or 0.0.0.0 for every address", key="host"
        )
    if options.threads is None:
        options.threads = default_threads(options.prefill + options.decode)
    if options.threads < 1:
        raise ConfigError(f"--threads is {options.threads}: use 1 or more", key="threads")
    if (options.ssd is None) != (not options.ssd_bytes):
        raise ConfigError("--ssd DIR and --ssd-bytes SIZE go together", key="--ssd")
    if options.model and not Path(options.model).is_dir():
        raise UsageError(f"--model: there is no folder {options.model}", path=options.model)
    runtime = RuntimeConfig(
        model=options.model,
        device=options.device,
        dtype=options.dtype,
        block_tokens=options.block_tokens,
        dram_bytes=parse_size(options.dram, key="--dram"),
        gpu_bytes=parse_size(options.kv_bytes, key="--kv-bytes"),
        host=options.host,
        port=options.port,
        chunk_tokens=options.chunk_tokens,
        running_max=options.running_max,
        request_timeout_s=options.request_timeout_s,
    )
    return ServeOptions(
        runtime=runtime,
        cache_dir=options.cache_dir,
        run_dir=options.run_dir,
        trace_dir=options.trace_dir,
        die_with=options.die_with,
        outbox_bytes=parse_size(options.outbox_bytes, key="--outbox-bytes"),
        threads=options.threads,
        prefill=options.prefill,
        decode=options.decode,
        transport=options.transport,
        ucx_library=options.ucx_library,
        ssd=options.ssd,
        ssd_bytes=parse_size(options.ssd_bytes, key="--ssd-bytes") if options.ssd else 0,
    )
