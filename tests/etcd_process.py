"""A real etcd server for tests: one member on loopback that can be killed, stopped, emptied."""

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from tests.stopped import stop

WAIT_S = 60.0
# One member elects itself: it need not wait for others, as it does by default for a second or more.
_QUICK = ("--heartbeat-interval", "10", "--election-timeout", "100")
PROGRAM = Path(__file__).parents[1] / "build" / "etcd" / "etcd"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class EtcdProcess:
    """One etcd, ready when the constructor returns. Its address stays over restarts."""

    def __init__(self, folder: Path, *flags: str, tls: bool = False) -> None:
        if not PROGRAM.exists():
            raise AssertionError(f"the tests need a real etcd server: run `make {_shown()}` once")
        self._data = folder / "etcd"
        self._log = (folder / "etcd.log").open("ab")
        self._scheme = "https" if tls else "http"
        self._flags: Sequence[str] = flags
        self.url = f"{self._scheme}://127.0.0.1:{free_port()}"
        self._peer = f"http://127.0.0.1:{free_port()}"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                *(str(PROGRAM), "--name", "one", "--data-dir", str(self._data)),
                *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
                *("--listen-peer-urls", self._peer, "--initial-advertise-peer-urls", self._peer),
                *("--initial-cluster", f"one={self._peer}"),
                *_QUICK,
                *self._flags,
            ],
            stdout=self._log,
            stderr=self._log,
        )
        if self._scheme == "http":
            self.wait_ready()

    def wait_ready(self, verify: object = True) -> None:
        give_up = time.monotonic() + WAIT_S
        with httpx.Client(trust_env=False, verify=verify) as client:  # type: ignore[arg-type]
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(f"{self.url}/health").json().get("health") == "true":
                        return
                assert self.process is not None
                assert self.process.poll() is None, Path(self._log.name).read_text()[-2000:]
                assert time.monotonic() < give_up, "etcd did not become ready"
                time.sleep(0.02)

    def halt(self) -> None:
        """Stop it where it is, and wait until it stands still; SIGCONT lets it go on."""
        assert self.process is not None
        stop(self.process.pid)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it at once, wherever it is. Its data stays."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(WAIT_S)
            self.process = None

    def wipe(self) -> None:
        """Kill it and remove all it knew."""
        self.kill()
        shutil.rmtree(self._data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        self._log.close()


def _shown() -> str:
    return "/".join(PROGRAM.parts[-3:])
