"""Settings of vLLM for tests on a CPU, before anything imports it; models; no test is skipped."""

import os
import random
from pathlib import Path

import pytest

os.environ.update(
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine is in this process: tests look inside
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
    VLLM_HOST_IP="127.0.0.1",  # workers meet there, on a machine without a network, too
    GLOO_SOCKET_IFNAME="lo",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
)

from tests.vllm.models import VOCABULARY, make_model  # after the environment


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models") / "llama")


def prompts(*sizes: int, seed: int = 0, shared: int = 0) -> list[list[int]]:
    """Make prompts of random tokens; the first ``shared`` are the same in all of them."""
    source = random.Random(seed)
    beginning = [source.randrange(3, VOCABULARY) for _ in range(shared)]
    return [
        beginning + [source.randrange(3, VOCABULARY) for _ in range(size - shared)]
        for size in sizes
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Turn a skip into a failure: this environment has everything."""
    if report.skipped:
        report.outcome = "failed"


@pytest.hookimpl(tryfirst=True)
def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Turn the skip of a whole file into a failure."""
    if report.skipped:
        report.outcome = "failed"
