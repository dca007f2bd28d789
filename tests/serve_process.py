"""A real kvpool-serve with all of its processes, for tests that need one, and ways to look into it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from kvpool.client import protocol
from kvpool.client.rpc import Caller
from kvpool.errors import KVPoolError
from kvpool.integration.runtime.handoff import STATUS, Empty, WorkerStatus
from tests.stopped import stop
from tests.waiting import until

# End a test that hangs; nothing here takes near as long, but a machine may be busy.
START_S = 120.0
WAIT_S = 60.0

# The only worker of a role may be called by the role.
_FIRST = {"prefill": "p0", "decode": "d0"}
_POOL_MODULE = "kvpool.server.main"


def demo_model_folder() -> Path:
    """The demo's model, converted on the first use ever."""
    from kvpool.integration.runtime.demo_model import demo_model

    return demo_model(Path.home() / ".cache" / "kvpool")


@dataclass(frozen=True)
class Holdings:
    """All that requests can hold in all the processes. Equal before and after, or it leaked."""

    prefill_blocks_free: int
    outbox_free: int
    decode_blocks_free: int
    running: int
    pool_reserved: int
    pool_quarantined: int
    leases: int


class ServeProcess:
    """One kvpool-serve, from construction to ``stop``; it serves when the constructor returns."""

    def __init__(
        self,
        *flags: str,
        name: str = "",
        model: Path | None = None,
        prefill: int = 1,
        decode: int = 1,
    ) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="kvps-")
        home = Path(self._home.name)
        self.run_dir = home / "run"
        self.trace_dir = home / "trace"
        self.log = home / "log"
        self.model = demo_model_folder() if model is None else model
        self.name = name or self.model.name
        self.prefill = [f"p{number}" for number in range(prefill)]
        self.decode = [f"d{number}" for number in range(decode)]
        self._log = self.log.open("wb")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "kvpool.integration.serve", "--port", "0"),
                *("--model", str(self.model), "--run-dir", str(self.run_dir)),
                *("--prefill", str(prefill), "--decode", str(decode)),
                *("--die-with", str(os.getpid())),
                *("--trace-dir", str(self.trace_dir), "--dram", "256MiB", *flags),
            ],
            stdout=subprocess.PIPE,
            stderr=self._log,
            # What a terminal does: the launcher leads a group, and Ctrl-C goes to all of it.
            start_new_session=True,
            text=True,
        )
        self.http = httpx.Client(timeout=WAIT_S, trust_env=False)
        self._callers: dict[str, Caller] = {}
        try:
            self.url = self._wait_for_url()
        except BaseException:
            self.stop()
            raise
        self.http.base_url = self.url

    def _wait_for_url(self) -> str:
        """Read what the launcher prints until it says where it serves."""
        assert self.process.stdout is not None
        timer = signal_after(START_S, self.process)
        with timer:
            for line in self.process.stdout:
                if " at http://" in line:
                    return line.split(" at ")[1].split("/v1")[0]
        raise AssertionError(f"kvpool-serve did not start:\n{self.log.read_text()}")

    # ---- looking in ------------------------------------------------------------------------------

    def pids(self) -> dict[str, int]:
        """Process ids of the children that live now, by name."""
        found: dict[str, int] = {}
        for pid in children(self.process.pid):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if _POOL_MODULE in command:
                    found["pool"] = pid
                elif "--name" in command:
                    found[command[command.index("--name") + 1]] = pid
        return found

    def status(self, worker: str) -> WorkerStatus:
        """What a worker says of itself."""
        return self._caller(f"{_FIRST.get(worker, worker)}.sock").call(STATUS, Empty(), WAIT_S)

    def pool_stats(self) -> dict[str, int]:
        """What the pool says of itself."""
        return dict(self._pool().stats)

    def wait_connected(self) -> None:
        """Wait until every worker is connected to the pool: after a new one has been started."""
        workers = len(self.prefill + self.decode)

        def connected() -> bool:
            try:
                return self._pool().extra["clients"] == workers
            except KVPoolError:
                return False

        until(connected, "all workers are connected to the pool")

    def _pool(self) -> protocol.StatsReply:
        return self._caller(protocol.CONTROL_SOCKET).call(protocol.STATS, protocol.Done(), WAIT_S)

    def holdings(self) -> Holdings:
        """All that requests hold now."""
        prefill, decode = (
            map(self.status, self.prefill),
            [self.status(name) for name in self.decode],
        )
        workers, pool = [*prefill, *decode], self.pool_stats()
        return Holdings(
            prefill_blocks_free=sum(one.blocks_free for one in workers if one.role == "prefill"),
            outbox_free=sum(one.outbox_free for one in workers),
            decode_blocks_free=sum(one.blocks_free for one in decode),
            running=sum(one.running + one.waiting for one in workers),
            pool_reserved=pool["reserved"],
            pool_quarantined=pool["quarantined"],
            leases=pool["leases"],
        )

    def wait_idle(self) -> Holdings:
        """Wait until nothing is held by any request."""

        def idle() -> bool:
            try:
                held, workers = self.holdings(), map(self.status, self.prefill + self.decode)
                return (
                    all(
                        one.blocks_free == one.blocks and one.outbox_free == one.outbox_slots
                        for one in workers
                    )
                    and held.running == held.pool_reserved == held.pool_quarantined == 0
                    and held.leases == 0
                )
            except KVPoolError:
                return False  # a worker that was killed is not back yet

        until(idle, "all blocks, slots and leases are free")
        return self.holdings()

    def wait_healthy(self) -> None:
        """Wait until ``/health`` says that all is well."""
        until(lambda: self.http.get("/health").status_code == 200, "the server is healthy")

    def events(self, worker: str) -> list[dict[str, Any]]:
        """All events that a worker has written."""
        file = self.trace_dir / f"{_FIRST.get(worker, worker)}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()]

    def _caller(self, socket: str) -> Caller:
        if socket not in self._callers:
            self._callers[socket] = Caller(f"unix:{self.run_dir / socket}")
        return self._callers[socket]

    # ---- asking ----------------------------------------------------------------------------------

    def complete(self, prompt: str | list[int], **fields: object) -> dict[str, Any]:
        """One completion, not streamed; greedy."""
        body = {"prompt": prompt, "temperature": 0, **fields}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def chat(self, messages: list[dict[str, str]], **fields: object) -> dict[str, Any]:
        """One chat completion, not streamed; greedy."""
        body = {"messages": messages, "temperature": 0, **fields}
        answer = self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    @contextlib.contextmanager
    def stream(
        self, prompt: str | list[int], **fields: object
    ) -> Iterator[Iterator[dict[str, Any]]]:
        """One streamed completion: an iterator of its chunks, ended by [DONE]. Leaving it hangs up."""
        body = {"prompt": prompt, "temperature": 0, "stream": True, **fields}
        with self.http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            yield chunks(answer.iter_lines())

    # ---- the end ---------------------------------------------------------------------------------

    def stop(self) -> int:
        """Ask it to end, and return its exit status."""
        self.http.close()
        for caller in self._callers.values():
            caller.close()
        try:
            if self.process.poll() is None:
                self.process.terminate()
            return self.process.wait(WAIT_S)
        finally:
            self.process.kill()
            self.process.wait(WAIT_S)
            assert self.process.stdout is not None
            self.process.stdout.close()
            self._log.close()
            self._home.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            sys.stderr.write(self.log.read_text())
        self.stop()


def chunks(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Read server-sent events up to [DONE]."""
    for line in lines:
        if not line:
            continue
        assert line.startswith("data: "), line
        if line == "data: [DONE]":
            return
        yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")


def children(pid: int) -> list[int]:
    """Process ids of the children of a process."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += [int(word) for word in file.read_text().split()]
    return found


def alive(pid: int) -> bool:
    """Say whether a process lives: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextlib.contextmanager
def signal_after(timeout_s: float, process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill a process that takes longer, so that reading its output ends."""
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Keep a process stopped inside the block."""
    stop(pid)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
