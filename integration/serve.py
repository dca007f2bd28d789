"""``kvpool-serve``: one command that serves a model on this machine behind the OpenAI HTTP API.

Owns the command line, the order of start and stop (a pool process, prefill and decode workers, and
the Conductor in this process), and the end of a process that stays silent. Who calls it: people,
from a shell.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvicorn
from fastapi import FastAPI
from tqdm import tqdm

from kvpool.client import protocol
from kvpool.client.rpc import AsyncCaller
from kvpool.completion import Deadline
from kvpool.config import RUN_DIR_BYTES_MAX, RuntimeConfig, parse_size
from kvpool.errors import (
    ConfigError,
    KVPoolError,
    PeerUnreachableError,
    UnavailableError,
    UsageError,
)
from kvpool.integration.conductor.app import Conductor, create_app
from kvpool.integration.conductor.dispatch import Dispatcher
from kvpool.integration.conductor.links import Heartbeat, WorkerLink
from kvpool.integration.conductor.model import ModelText
from kvpool.integration.process import leave
from kvpool.integration.supervisor import Supervisor
from kvpool.transfer.choice import TRANSPORT_KINDS, TransportKind

logger = logging.getLogger(__name__)

POOL_NAME: Final = "pool"
# More workers of a role than this are a slip of the finger.
WORKERS_MAX: Final = 64
# A process that is there but has not answered for this long is killed and started again: nothing
# brings a stopped process back but whoever stopped it. Its requests have gone elsewhere long before.
SILENT_KILL_S: Final = 20.0
# Open connections get this long at the end; the rest of stop_timeout_s is for the processes.
_HTTP_GRACE_S: Final = 1.0
_POLL_S: Final = 0.05
_SILENCE_CHECK_S: Final = 0.5
# Left at the end for what is not waiting: reaping processes, removing files.
_REAP_S: Final = 0.5

Coro = Coroutine[Any, Any, Any]

_EPILOG: Final = """\
examples:
  kvpool-serve                                   the demo model, SmolLM2-135M-Instruct
  kvpool-serve --model ./Llama-3.2-1B --port 9000
  kvpool-serve --dram 8GiB                       keep more KV blocks between requests
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
        outbox_bytes: Staging of layer slices in each prefill worker.
        threads: Threads that compute, in each worker.
        prefill, decode: How many workers of each role.
        transport: How KV blocks travel between the processes.
    """

    runtime: RuntimeConfig
    cache_dir: Path
    run_dir: Path | None
    trace_dir: Path | None
    outbox_bytes: int
    threads: int
    prefill: int
    decode: int
    transport: TransportKind

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
    parser.add_argument("--run-dir", type=Path, help="folder of the sockets (default: a fresh one)")
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
    if options.threads is None:
        options.threads = default_threads(options.prefill + options.decode)
    if options.threads < 1:
        raise ConfigError(f"--threads is {options.threads}: use 1 or more", key="threads")
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
        outbox_bytes=parse_size(options.outbox_bytes, key="--outbox-bytes"),
        threads=options.threads,
        prefill=options.prefill,
        decode=options.decode,
        transport=options.transport,
    )


def bind(host: str, port: int) -> socket.socket:
    """Take the HTTP port before anything else is started.

    Raises:
        UsageError: It cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=256)
    except OSError as error:
        raise UsageError(
            f"cannot listen at {host} port {port} ({error.strerror}): choose another with --port"
        ) from error


@contextlib.contextmanager
def made_run_dir(wanted: Path | None) -> Iterator[Path]:
    """Make the folder of the sockets, for this user alone, and remove it at the end.

    Raises:
        UsageError: The folder is in use, or its path is too long for a socket.
    """
    if wanted is None:
        path = Path(tempfile.mkdtemp(prefix="kvpool-"))
    else:
        path = wanted.absolute()
        if len(str(path).encode()) > RUN_DIR_BYTES_MAX:
            raise UsageError(f"--run-dir: use a path of at most {RUN_DIR_BYTES_MAX} bytes")
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.chmod(0o700)
            if any(path.iterdir()):
                raise UsageError(f"--run-dir: {path} is not empty; another server may be there")
        except OSError as error:
            raise UsageError(f"--run-dir: {path}: {error.strerror}") from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def child_commands(options: ServeOptions, model: Path, run_dir: Path) -> dict[str, Sequence[str]]:
    """Return the command of each child process, in the order of their start."""
    runtime = options.runtime
    python = (sys.executable, "-m")
    transport = ("--transport", options.transport)
    dram = ("--dram", str(runtime.dram_bytes))
    pool = ("--run-dir", str(run_dir), *dram, *transport, "--die-with-parent")
    shared = (
        *("--model", str(model)),
        *("--run-dir", str(run_dir)),
        *("--device", runtime.device),
        *("--dtype", runtime.dtype),
        *("--block-tokens", str(runtime.block_tokens)),
        *("--kv-bytes", str(runtime.gpu_bytes)),
        *("--outbox-bytes", str(options.outbox_bytes)),
        *("--chunk-tokens", str(runtime.chunk_tokens)),
        *("--running-max", str(runtime.running_max)),
        *("--threads", str(options.threads)),
        *transport,
    )

    def worker(role: str, name: str) -> tuple[str, ...]:
        trace = options.trace_dir and ("--trace", str(options.trace_dir / f"{name}.jsonl"))
        module = f"kvpool.integration.runtime.{role}"
        return (*python, module, *shared, "--name", name, *(trace or ()))

    return {POOL_NAME: (*python, "kvpool.server.main", *pool)} | {
        name: worker(role, name) for name, role in options.workers.items()
    }


def find_model(options: ServeOptions) -> tuple[Path, str]:
    """Return the model's folder and what clients call it; converts the demo's model once."""
    from kvpool.integration.runtime.demo_model import MODEL_NAME, demo_model

    if options.runtime.model:
        folder = Path(options.runtime.model).absolute()
        if not (folder / "config.json").is_file():
            raise UsageError(f"--model: {folder} holds no config.json: give a model's folder")
        return folder, folder.name
    return demo_model(options.cache_dir), MODEL_NAME


class _Http:
    """The HTTP server of the Conductor, in the running loop."""

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
            log_level="warning",
            timeout_graceful_shutdown=math.ceil(_HTTP_GRACE_S),
        )
        self._server = _Server(config)
        self._listener = listener
        self._task: asyncio.Task[None] | None = None

    async def start(self, timeout_s: float) -> None:
        """Serve from now on. Raises UnavailableError if it does not start."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        deadline = Deadline(timeout_s)
        while not self._server.started:
            if self._task.done() or deadline.passed():
                raise UnavailableError("the HTTP server did not start: its message is above")
            await asyncio.sleep(_POLL_S)

    async def stop(self) -> None:
        """Give open connections a moment, then end. Idempotent."""
        if self._task is not None:
            self._server.should_exit = True
            await asyncio.wait([self._task], timeout=2 * _HTTP_GRACE_S)
            self._task.cancel()


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: the launcher has the order of the stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


async def serve(
    options: ServeOptions, model: Path, name: str, run_dir: Path, listener: socket.socket
) -> None:
    """Start all processes, serve until SIGINT or SIGTERM, and stop all of them.

    Raises:
        UsageError, UnavailableError: They did not start.
    """
    runtime = options.runtime
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    supervisor = Supervisor(child_commands(options, model, run_dir))
    links = {name: WorkerLink(name, f"unix:{run_dir / name}.sock") for name in options.workers}
    dispatcher = Dispatcher(
        [links[name] for name, role in options.workers.items() if role == "prefill"],
        [links[name] for name, role in options.workers.items() if role == "decode"],
        request_timeout_s=runtime.request_timeout_s,
    )
    pool_caller = AsyncCaller(f"unix:{run_dir / protocol.CONTROL_SOCKET}")
    pool = Heartbeat(POOL_NAME, lambda s: pool_caller.call(protocol.STATS, protocol.Done(), s))
    hearts = (pool, *links.values())
    watchers: list[asyncio.Task[None]] = []
    http: _Http | None = None
    try:
        await supervisor.start()
        text = await asyncio.to_thread(ModelText.load, model, name)
        ready = _ready(hearts, runtime.start_timeout_s)
        if not await _first(ready, supervisor.failed_start(), stop.wait()):
            return
        silent = end_silent(hearts, supervisor, start_timeout_s=runtime.start_timeout_s)
        watchers += [asyncio.create_task(pool.watch()), asyncio.create_task(silent)]

        def problems() -> list[str]:
            silence = [] if pool.alive else [f"process {POOL_NAME} does not answer"]
            return supervisor.problems() + silence

        conductor = Conductor(dispatcher, text, problems)
        http = _Http(create_app(conductor), listener)
        await http.start(runtime.start_timeout_s)
        print(_banner(runtime.host, listener.getsockname()[1], name), flush=True)
        await stop.wait()
        logger.info("stopping")
    finally:
        if http is not None:
            await http.stop()
        for watcher in watchers:
            watcher.cancel()
        await supervisor.stop(runtime.stop_timeout_s - 2 * _HTTP_GRACE_S - _REAP_S)
        await dispatcher.close()
        await pool_caller.close()


async def end_silent(
    hearts: Sequence[Heartbeat], supervisor: Supervisor, *, start_timeout_s: float
) -> None:
    """Kill processes that stay silent, or do not come up, until cancelled.

    Args:
        hearts: Of processes that are the supervisor's children by the same names.
        supervisor: Starts them again.
        start_timeout_s: Longest time from the start of a process to its first answer.
    """
    while True:
        await asyncio.sleep(_SILENCE_CHECK_S)
        for heart in hearts:
            # Not what its predecessor did: that one may have been silent until it was killed.
            age_s = time.monotonic() - supervisor.children[heart.name].began
            if min(age_s, _since_s(heart.silent_since)) > SILENT_KILL_S:
                supervisor.kill(heart.name, f"no answer for {SILENT_KILL_S:.0f} s")
            elif min(age_s, _since_s(heart.down_since)) > start_timeout_s:
                supervisor.kill(heart.name, f"not up within {start_timeout_s:.0f} s")


def _since_s(at: float | None) -> float:
    return 0.0 if at is None else time.monotonic() - at


async def _ready(hearts: Sequence[Heartbeat], timeout_s: float) -> None:
    """Wait until every process answers, with a progress bar on a terminal."""
    try:
        with tqdm(total=len(hearts), desc="Starting", unit="process", disable=None) as bar:
            async with asyncio.timeout(timeout_s):
                for heart in hearts:
                    bar.set_postfix_str(heart.name)
                    await heart.wait_alive(timeout_s)
                    bar.update()
    except (TimeoutError, PeerUnreachableError) as late:
        raise UnavailableError(f"not ready within {timeout_s:.0f} s: see the log above") from late


async def _first(ready: Coro, failed: Coro, stopped: Coro) -> bool:
    """Wait for the start to end. Returns False if it was stopped; raises if it failed."""
    tasks = [asyncio.create_task(work) for work in (ready, failed, stopped)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        return tasks[0] in done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _banner(host: str, port: int, model: str) -> str:
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    question = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 64,
        }
    )
    return f"""
kvpool serves {model} at {url}/v1  (Ctrl-C stops it)
Try:
  curl -s {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{question}'
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``kvpool-serve``. Returns the exit code: 2 for what the caller must fix."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s serve %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also before the loop runs
    try:
        options = parse_arguments(argv)
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(bind(options.runtime.host, options.runtime.port))
            if options.trace_dir is not None:
                options.trace_dir.mkdir(parents=True, exist_ok=True)
            model, name = find_model(options)
            run_dir = stack.enter_context(made_run_dir(options.run_dir))
            asyncio.run(serve(options, model, name, run_dir, listener))
        leave(0)
    except UsageError as error:
        print(f"kvpool-serve: {error}", file=sys.stderr)
        return 2
    except (KVPoolError, OSError) as error:
        print(f"kvpool-serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
