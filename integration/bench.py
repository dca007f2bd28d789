"""Figures of a whole kvpool-serve, taken over HTTP as a client sees them, and of Transformers alone.

Owns the processes for the time of a measurement, and their figures: tokens per second, and the time
to the first token. Who calls it: ``kvpool bench e2e``.
"""

import contextlib
import http.client
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Self

from kvpool.errors import UnavailableError

START_TIMEOUT_S: Final = 300.0
REQUEST_TIMEOUT_S: Final = 300.0
# A token that any of the supported models knows; prompts are random, so that nothing is cached.
_TOKENS: Final = range(1000, 30_000)


class ServedModel:
    """One kvpool-serve on this machine, from construction to ``close``.

    Args:
        model: Folder of the model.
        threads: That each worker computes with.

    Raises:
        UnavailableError: It did not start.
    """

    def __init__(self, model: Path, threads: int) -> None:
        command = ["kvpool.integration.serve", "--port", "0", "--model", str(model)]
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", *command, "--threads", str(threads)),
                *("--die-with", str(os.getpid())),
            ],
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

    def first_token(self, prompt: Sequence[int]) -> tuple[float, int]:
        """Return the seconds from a request to its first content, and how much was cached."""
        began = time.perf_counter()
        took_s, cached = 0.0, 0
        for event in self._events(prompt, 1):
            if not took_s and event["choices"]:
                took_s = time.perf_counter() - began
            if event.get("usage"):
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        return took_s, cached

    def tokens_per_second(self, running: int, *, prompt_tokens: int, max_tokens: int) -> float:
        """Return the rate at which ``running`` requests at once get tokens.

        Measured from when all have their first token to when the first one ends.
        """
        prompts = [self.prompt(prompt_tokens) for _ in range(running)]
        times = self._all_times(prompts, max_tokens)
        begin = max(one[0] for one in times)
        end = min(one[-1] for one in times)
        count = sum(begin < at <= end for one in times for at in one)
        if end <= begin or count < running:
            raise UnavailableError("the requests did not run at the same time: ask for more tokens")
        return count / (end - begin)

    def whole_tokens_per_second(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Return the rate of requests that begin at once, from the first sent to the last ended."""
        began = time.perf_counter()
        times = self._all_times(prompts, max_tokens)
        return sum(map(len, times)) / (max(one[-1] for one in times) - began)

    def _all_times(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[float]]:
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: self._times(prompt, max_tokens), prompts))

    def _times(self, prompt: Sequence[int], max_tokens: int) -> list[float]:
        events = self._events(prompt, max_tokens)
        times = [time.perf_counter() for event in events if event["choices"]]
        if not times:
            raise UnavailableError("a request ended without a token")
        return times

    def _events(self, prompt: Sequence[int], max_tokens: int) -> Generator[dict[str, Any]]:
        """Yield one event for each token of a streamed completion."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=REQUEST_TIMEOUT_S)
        body = {
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
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


class ModelAlone:
    """Transformers without kvpool, in a process of its own; see ``bench_alone``.

    Args:
        model: Folder of the model.
        threads: That it computes with.

    Raises:
        UnavailableError: It did not start.
    """

    def __init__(self, model: Path, threads: int) -> None:
        command = ["kvpool.integration.bench_alone", "--model", str(model)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command, "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self._answer(START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def forward_s(self, prompt: Sequence[int]) -> float:
        """Return the seconds of one forward pass."""
        return float(self._ask({"forward": list(prompt)})["seconds"])

    def tokens_per_second(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Return the rate of ``generate_batch`` over the whole of it."""
        told = self._ask({"generate": [*map(list, prompts)], "max_tokens": max_tokens})
        return float(told["tokens"] / told["seconds"])

    def _ask(self, question: dict[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer(REQUEST_TIMEOUT_S)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        """Return the next answer; what else the libraries print is passed over."""
        assert self._process.stdout is not None
        killer = threading.Timer(timeout_s, self._process.kill)
        killer.start()
        try:
            for line in self._process.stdout:
                if line.startswith("{"):
                    told: dict[str, Any] = json.loads(line)
                    return told
        finally:
            killer.cancel()
        raise UnavailableError("Transformers alone did not answer: its message is above")

    def close(self) -> None:
        """Stop it. Idempotent."""
        self._process.kill()
        self._process.wait(REQUEST_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
