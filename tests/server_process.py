"""A real kvpool-server process for tests that need one."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.stopped import stop

# Ends a test that hangs; nothing here takes near as long.
WAIT_S = 30.0


class ServerProcess:
    """One server, from construction to ``stop``; ready when the constructor returns.

    ``prefix`` goes before its command: what runs it somewhere else.
    """

    def __init__(
        self, run_dir: Path, dram_bytes: int, *flags: str, prefix: Sequence[str] = ()
    ) -> None:
        self.run_dir = run_dir
        self.flags = flags
        self.process = subprocess.Popen(
            [
                *prefix,
                *(sys.executable, "-m", "kvpool.server.main", "--die-with", str(os.getpid())),
                *("--run-dir", str(run_dir), "--dram", str(dram_bytes), *flags),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], WAIT_S)
        line = self.process.stdout.readline() if readable else ""
        if not line.startswith("kvpool-server ready"):
            self.kill()
            assert self.process.stderr is not None
            raise AssertionError(f"no server: {line!r} {self.process.stderr.read()}")

    @property
    def pid(self) -> int:
        return self.process.pid

    def halt(self) -> None:
        """Stop it where it is, and wait until it stands still; SIGCONT lets it go on."""
        stop(self.process.pid)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it at once, wherever it is."""
        self.process.kill()
        self.process.wait(WAIT_S)

    def stop(self) -> int:
        """Ask it to end, and return its exit status; close its pipes."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
        self.process.terminate()
        try:
            return self.process.wait(WAIT_S)
        finally:
            for pipe in (self.process.stdout, self.process.stderr):
                if pipe is not None:
                    pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
