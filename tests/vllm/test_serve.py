"""``vllm serve`` with the connector, under ``vllm bench serve``: what could be hit was hit."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.server_process import ServerProcess
from tests.vllm.engines import BLOCK_TOKENS, START_S, free_port
from tests.vllm.models import add_tokenizer, make_model
from tests.waiting import until

VLLM = Path(sys.executable).with_name("vllm")
PREFIXES, EACH, PREFIX_TOKENS, SUFFIX_TOKENS = 3, 4, 256, 48
REQUESTS = PREFIXES * EACH
# Of each prompt. The benchmark's words are a few tokens more than it was told: never as many as a block.
WHOLE = (PREFIX_TOKENS + SUFFIX_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
OUTPUT_TOKENS = 4


class Served:
    """One ``vllm serve``, ready when the constructor returns."""

    def __init__(self, model: Path, extra: dict[str, str], log: Path, processes: str = "1") -> None:
        self.base = f"http://127.0.0.1:{free_port()}"
        transfer = {
            "kv_connector": "KvpoolConnector",
            "kv_connector_module_path": "kvpool.integration.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"lookup_timeout_s": 60, "load_timeout_s": 60, **extra},
        }
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": processes,
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        }
        self.log = log
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                [
                    *(str(VLLM), "serve", str(model), "--host", "127.0.0.1"),
                    *("--port", self.base.rsplit(":", 1)[1], "--dtype", "float32"),
                    *("--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8"),
                    *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", "256"),
                    *("--kv-cache-memory-bytes", str(64 << 20)),
                    *("--kv-transfer-config", json.dumps(transfer)),
                ],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        self._wait()

    def _wait(self) -> None:
        for _ in range(START_S):
            if self.process.poll() is not None:
                break
            try:
                self.ask("/health")
                return
            except OSError:
                try:
                    self.process.wait(1)
                except subprocess.TimeoutExpired:
                    continue
        self.stop()
        raise AssertionError(f"vllm serve did not start: {self.log.read_text()[-12_000:]}")

    def ask(self, path: str, method: str = "GET") -> str:
        request = urllib.request.Request(self.base + path, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())

    def counters(self) -> dict[str, float]:
        """Read the counters without labels' values: there is one engine."""
        found = re.findall(
            r"^vllm:(\w+)_total\{[^}]*\} ([\d.e+]+)$", self.ask("/metrics"), re.MULTILINE
        )
        return {name: float(value) for name, value in found}

    def bench(self, model: Path) -> None:
        """Run the benchmark, until the counters know its last token."""
        before = self.counters()["generation_tokens"]
        done = subprocess.run(
            [
                *(str(VLLM), "bench", "serve", "--base-url", self.base, "--model", str(model)),
                *("--dataset-name", "prefix_repetition", "--seed", "3", "--ignore-eos"),
                *("--prefix-repetition-prefix-len", str(PREFIX_TOKENS)),
                *("--prefix-repetition-suffix-len", str(SUFFIX_TOKENS)),
                *("--prefix-repetition-num-prefixes", str(PREFIXES)),
                *("--prefix-repetition-output-len", str(OUTPUT_TOKENS), "--max-concurrency", "1"),
                *("--num-prompts", str(REQUESTS), "--num-warmups", "0"),
            ],
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        whole = before + REQUESTS * OUTPUT_TOKENS
        until(lambda: self.counters()["generation_tokens"] == whole, "the count of all tokens")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model("llama", tmp_path_factory.mktemp("serve") / "llama")
    add_tokenizer(model)
    return model


def test_the_hit_rate_is_the_ideal_one(model: Path, tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path / "kvpool", 64 << 20),
        Served(model, {"server": str(tmp_path / "kvpool")}, tmp_path / "log") as server,
    ):
        _what_can_be_hit_is_hit(server, model)


def _what_can_be_hit_is_hit(server: Served, model: Path) -> None:
    start = server.counters()
    server.bench(model)
    first = server.counters()
    server.ask("/reset_prefix_cache", "POST")
    server.bench(model)
    second = server.counters()

    def grown(name: str) -> tuple[float, float]:
        return first[name] - start[name], second[name] - first[name]

    tokens = grown("prompt_tokens")
    assert tokens[0] == tokens[1]
    assert REQUESTS * WHOLE < tokens[1] <= REQUESTS * (WHOLE + BLOCK_TOKENS)
    local, external = grown("prefix_cache_hits"), grown("external_prefix_cache_hits")
    # In the second run every prompt is known whole: all that is loadable was taken from somewhere,
    # the first of each prefix from the pool.
    assert local[1] + external[1] == REQUESTS * WHOLE
    assert external[1] >= PREFIXES * WHOLE
    # In the first run a prefix is computed once, and then known.
    assert local[0] + external[0] == (REQUESTS - PREFIXES) * PREFIX_TOKENS
    assert second["kvpool_failed_loads"] == 0
    assert second["kvpool_loaded_blocks"] * BLOCK_TOKENS == second["external_prefix_cache_hits"]


def test_a_pool_in_the_engine_outlives_it_on_disk(model: Path, tmp_path: Path) -> None:
    """One process for all, and an SSD: a second engine finds every block of the first."""
    extra = {"dram": "32MiB", "ssd": str(tmp_path / "ssd"), "ssd_bytes": "64MiB"}
    for run in range(2):
        with Served(model, extra, tmp_path / f"log-{run}", processes="0") as server:
            server.bench(model)
            found = server.counters()
        local, external = found["prefix_cache_hits"], found["external_prefix_cache_hits"]
        assert found["kvpool_failed_loads"] == 0
        if run:
            assert local + external == REQUESTS * WHOLE
            assert external >= PREFIXES * WHOLE
        else:
            assert local + external == (REQUESTS - PREFIXES) * PREFIX_TOKENS
