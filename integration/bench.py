"""Figures of a whole kvpool-serve, taken over HTTP as a client sees them.

Owns a served model for the time of a measurement, and two figures of it: tokens per second while a
number of requests run, and the time to the first token. Who calls it: ``kvpool bench e2e``.
"""

import contextlib
import http.client
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Self

from kvpool.errors import UnavailableError

START_TIMEOUT_S: Final = 300.0
REQUEST_TIMEOUT_S: Final = 300.0
# A token that any of the supported models knows; prompts are random, so that nothing is cached.
_TOKENS: Final = range(1000, 30_000)


class ServedModel:
    """One kvpool-serve on this machine, from construction to ``close``.

    Args:
        flags: Of kvpool-serve.

    Raises:
        UnavailableError: It did not start.
    """

    def __init__(self, *flags: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvpool.integration.serve", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._random = random.Random(0)
        try:
            self._host, self._port = self._address()
        except BaseException:
            self.close()
            raise

    def _address(self) -> tuple[str, int]:
        assert self._process.stdout is not None
        killer = threading.Timer(START_TIMEOUT_S, self._process.kill)
        killer.start()
        try:
            for line in self._process.stdout:
                if " at http://" in line:
                    host, port = line.split("http://")[1].split("/v1")[0].rsplit(":", 1)
                    return host, int(port)
        finally:
            killer.cancel()
        raise UnavailableError("kvpool-serve did not start: its message is above")

    def close(self) -> None:
        """Stop it. Idempotent."""
        self._process.terminate()
        self._process.wait(START_TIMEOUT_S)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prompt(self, count: int) -> list[int]:
        """Return ``count`` random tokens, never the same twice."""
        return self._random.choices(_TOKENS, k=count)

    def first_token_s(self, prompt: Sequence[int]) -> float:
        """Return the seconds from a request to its first event."""
        began = time.perf_counter()
        with contextlib.closing(self._events(prompt, 1)) as events:
            next(events)
            return time.perf_counter() - began

    def tokens_per_second(self, running: int, *, prompt_tokens: int, max_tokens: int) -> float:
        """Return the rate at which ``running`` requests at once get tokens.

        Measured from when all have their first token to when the first one ends.
        """
        prompts = [self.prompt(prompt_tokens) for _ in range(running)]
        with ThreadPoolExecutor(running) as threads:
            times = list(threads.map(lambda prompt: self._times(prompt, max_tokens), prompts))
        begin = max(one[0] for one in times)
        end = min(one[-1] for one in times)
        count = sum(begin < at <= end for one in times for at in one)
        if end <= begin or count < running:
            raise UnavailableError("the requests did not run at the same time: ask for more tokens")
        return count / (end - begin)

    def _times(self, prompt: Sequence[int], max_tokens: int) -> list[float]:
        return [time.perf_counter() for _ in self._events(prompt, max_tokens)]

    def _events(self, prompt: Sequence[int], max_tokens: int) -> Generator[dict[str, object]]:
        """Yield one event for each token of a streamed completion."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=REQUEST_TIMEOUT_S)
        body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "stream": True}
        try:
            connection.request("POST", "/v1/completions", json.dumps(body))
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise UnavailableError(f"status {answer.status}: {answer.read().decode()}")
            while line := answer.readline():
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))
        finally:
            connection.close()
