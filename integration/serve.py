"""``kvpool-serve``: one command that serves a model on this machine behind the OpenAI HTTP API.

Owns the order of start and stop (a pool process, prefill and decode workers, and the Conductor in
this process), and the end of a process that stays silent. Who calls it: people, from a shell.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from kvpool._native import lib
from kvpool.client import protocol
from kvpool.client.rpc import AsyncCaller
from kvpool.config import RUN_DIR_BYTES_MAX
from kvpool.errors import (
    KVPoolError,
    PeerUnreachableError,
    UnavailableError,
    UsageError,
)
from kvpool.integration.conductor.app import Conductor, create_app
from kvpool.integration.conductor.dispatch import Dispatcher
from kvpool.integration.conductor.edge import HttpLimits
from kvpool.integration.conductor.links import Heartbeat, WorkerLink
from kvpool.integration.conductor.model import ModelText
from kvpool.integration.http_server import HTTP_STOP_S, HttpServer
from kvpool.integration.process import leave
from kvpool.integration.serve_options import ServeOptions, parse_arguments
from kvpool.integration.supervisor import Supervisor
from kvpool.metrics import Metrics
from kvpool.standard_streams import never_wait_for_readers

logger = logging.getLogger(__name__)

POOL_NAME: Final = "pool"
# A process that is there but has not answered for this long is killed and started again: nothing
# brings a stopped process back but whoever stopped it. Its requests have gone elsewhere long before.
SILENT_KILL_S: Final = 20.0
# In the run directory: locked by who serves there.
_LOCK: Final = "serve.lock"
_SILENCE_CHECK_S: Final = 0.5
# Left at the end for what is not waiting: reaping processes, removing files.
_REAP_S: Final = 0.5

Coro = Coroutine[Any, Any, Any]


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

    A lock in it says that somebody serves there. What a killed server left is removed.

    Raises:
        UsageError: The folder is in use or holds other things, or its path is too long.
    """
    if wanted is None:
        path = Path(tempfile.mkdtemp(prefix="kvpool-"))
    else:
        path = wanted.absolute()
        if len(str(path).encode()) > RUN_DIR_BYTES_MAX:
            raise UsageError(f"--run-dir: use a path of at most {RUN_DIR_BYTES_MAX} bytes")
    with contextlib.ExitStack() as stack:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.chmod(0o700)
            strange = [
                one.name for one in path.iterdir() if one.name not in (_LOCK, *_sockets(path))
            ]
            if strange:
                raise UsageError(f"--run-dir: {path} holds {strange[0]}: give an empty folder")
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in _sockets(path):
                (path / name).unlink()
        except BlockingIOError as busy:
            raise UsageError(f"--run-dir: another kvpool-serve runs in {path}") from busy
        except OSError as error:
            raise UsageError(f"--run-dir: {path}: {error.strerror}") from error
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        yield path


def _sockets(path: Path) -> list[str]:
    return [one.name for one in path.iterdir() if one.is_socket()]


def child_commands(options: ServeOptions, model: Path, run_dir: Path) -> dict[str, Sequence[str]]:
    """Return the command of each child process, in the order of their start."""
    runtime = options.runtime
    python = (sys.executable, "-m")
    common: tuple[str, ...] = ("--transport", options.transport, "--die-with", str(os.getpid()))
    if options.ucx_library:
        common += ("--ucx-library", options.ucx_library)
    room: tuple[str, ...] = ("--dram", str(runtime.dram_bytes))
    if options.ssd is not None:
        room += ("--ssd", str(options.ssd), "--ssd-bytes", str(options.ssd_bytes))
    pool = ("--run-dir", str(run_dir), *room, *common)
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
        *common,
    )

    def worker(role: str, name: str) -> tuple[str, ...]:
        trace = options.trace_dir and ("--trace", str(options.trace_dir / f"{name}.jsonl"))
        module = f"kvpool.integration.runtime.{role}"
        return (*python, module, *shared, "--name", name, *(trace or ()))

    commands: dict[str, Sequence[str]] = {POOL_NAME: (*python, "kvpool.server.main", *pool)}
    commands.update((name, worker(role, name)) for name, role in options.workers.items())
    return commands


def find_model(options: ServeOptions) -> tuple[Path, str]:
    """Return the model's folder and what clients call it; converts the demo's model once."""
    from kvpool.integration.runtime.demo_model import MODEL_NAME, demo_model

    if options.runtime.model:
        folder = Path(options.runtime.model).absolute()
        if not (folder / "config.json").is_file():
            raise UsageError(f"--model: {folder} holds no config.json: give a model's folder")
        return folder, folder.name
    return demo_model(options.cache_dir), MODEL_NAME


def make_trace_dir(path: Path) -> None:
    """Make the folder of the traces. Raises UsageError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--trace-dir: {path}: {error.strerror}") from error


def check_sizes(options: ServeOptions, model: Path) -> None:
    """Raise UsageError unless each memory holds a block at least, before anything is started."""
    from kvpool.integration.runtime.model import read_spec

    runtime = options.runtime
    layout = read_spec(model, dtype=runtime.dtype).layout(runtime.block_tokens)
    for flag, size in (("--dram", runtime.dram_bytes), ("--kv-bytes", runtime.gpu_bytes)):
        if size < layout.block_bytes:
            raise UsageError(f"{flag} is {size} bytes: one block has {layout.block_bytes}")


async def serve(
    options: ServeOptions, model: Path, name: str, run_dir: Path, listener: socket.socket
) -> None:
    """Start all processes, serve until SIGINT, SIGTERM or SIGHUP, and stop all of them.

    Raises:
        UsageError, UnavailableError: They did not start.
    """
    runtime = options.runtime
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    supervisor = Supervisor(child_commands(options, model, run_dir))
    links = {name: WorkerLink(name, f"unix:{run_dir / name}.sock") for name in options.workers}
    metrics = Metrics(wings=("conductor",))
    dispatcher = Dispatcher(
        [links[name] for name, role in options.workers.items() if role == "prefill"],
        [links[name] for name, role in options.workers.items() if role == "decode"],
        request_timeout_s=runtime.request_timeout_s,
        sink=metrics,
    )
    pool_caller = AsyncCaller(f"unix:{run_dir / protocol.CONTROL_SOCKET}")
    pool = Heartbeat(POOL_NAME, lambda s: pool_caller.call(protocol.STATS, protocol.Done(), s))
    hearts = (pool, *links.values())
    watchers: list[asyncio.Task[None]] = []
    http: HttpServer | None = None
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

        limits = HttpLimits()
        conductor = Conductor(dispatcher, text, problems, limits, metrics)
        http = HttpServer(create_app(conductor), listener, limits)
        await http.start(runtime.start_timeout_s)
        print(_banner(runtime.host, listener.getsockname()[1], name), flush=True)
        await stop.wait()
        logger.info("stopping")
    finally:
        if http is not None:
            await http.stop()
        for watcher in watchers:
            watcher.cancel()
        await supervisor.stop(runtime.stop_timeout_s - HTTP_STOP_S - _REAP_S)
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
    said = False
    while True:
        await asyncio.sleep(_SILENCE_CHECK_S)
        try:
            _end_silent_now(hearts, supervisor, start_timeout_s)
        except Exception:
            if not said:  # it would be said twice a second
                logger.exception("processes that stay silent are not ended: please report this")
            said = True


def _end_silent_now(
    hearts: Sequence[Heartbeat], supervisor: Supervisor, start_timeout_s: float
) -> None:
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
    never_wait_for_readers()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s serve %(levelname)s %(message)s")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # also before the loop runs
    try:
        options = parse_arguments(argv)
        if options.die_with is not None:
            lib.kvp_die_with_parent(signal.SIGTERM)
            if os.getppid() != options.die_with:  # it died before the kernel was asked
                return 1
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(bind(options.runtime.host, options.runtime.port))
            if options.trace_dir is not None:
                make_trace_dir(options.trace_dir)
            model, name = find_model(options)
            check_sizes(options, model)
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
