"""An engine on a kvpool-server: over restarts, between processes, and when the server is lost."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.server_process import ServerProcess, until
from tests.vllm.conftest import prompts
from tests.vllm.engines import BLOCK_TOKENS, Answer, Engine
from tests.vllm.models import make_model
from tests.vllm.test_embedded import ideal, tokens

PROMPTS = prompts(180, 200, 321, seed=20)
ROOT = Path(__file__).parents[2]

# Runs in a process of its own: an engine that nobody else has anything in common with.
OTHER = """
import json, sys
from pathlib import Path
import tests.vllm.conftest
from tests.vllm.engines import Engine
model, run_dir, asked = json.loads(sys.stdin.read())
with Engine(Path(model), {"run_dir": run_dir}) as engine:
    answers = [engine.generate(prompt)[0] for prompt in asked]
print("ANSWERS", json.dumps([[a.tokens, a.cached] for a in answers]))
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "kvpool"


@pytest.fixture(scope="module")
def server(run_dir: Path) -> Iterator[ServerProcess]:
    with ServerProcess(run_dir, 64 << 20) as server:
        yield server


@pytest.fixture(scope="module")
def alone(llama: Path) -> list[Answer]:
    """What the engine answers without kvpool."""
    with Engine(llama, None) as engine:
        return [engine.generate(prompt)[0] for prompt in PROMPTS]


def test_another_process_then_a_restart(
    llama: Path, run_dir: Path, server: ServerProcess, alone: list[Answer]
) -> None:
    """Both engines run one after the other: the second finds what the first has stored."""
    done = subprocess.run(
        [sys.executable, "-c", OTHER],
        input=json.dumps([str(llama), str(run_dir), PROMPTS]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS")]
    cold = json.loads(line.removeprefix("ANSWERS"))
    assert [tuple(sampled) for sampled, _ in cold] == tokens(alone)
    assert [cached for _, cached in cold] == [0, 0, 0]
    for _ in range(2):
        with Engine(llama, {"run_dir": str(run_dir)}) as engine:
            warm = [engine.generate(prompt)[0] for prompt in PROMPTS]
        assert tokens(warm) == tokens(alone)
        assert [answer.cached for answer in warm] == [ideal(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "change",
    ["weights", "dtype", "block", "version", "cpu", "salt"],
    ids=lambda change: str(change),
)
def test_a_change_is_a_clean_miss(
    change: str,
    llama: Path,
    run_dir: Path,
    server: ServerProcess,
    alone: list[Answer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server has all blocks of the model; an engine that differs in one thing finds none."""
    extra: dict[str, object] = {"run_dir": str(run_dir)}
    model = llama
    settings: dict[str, Any] = {}
    if change == "weights":
        model = make_model("llama", tmp_path / "other", seed=1)
    elif change == "dtype":
        settings = {"dtype": "bfloat16"}
    elif change == "block":
        settings = {"block_size": 2 * BLOCK_TOKENS}
    elif change == "version":
        monkeypatch.setattr("vllm.__version__", "0.32.1")
    elif change == "cpu":
        monkeypatch.setattr("kvpool.integration.vllm.engine.cpu_kind", lambda: ("other bytes",))
    else:
        extra["salt"] = "another tenant"
    with Engine(model, extra, **settings) as engine:
        answers = [engine.generate(prompt)[0] for prompt in PROMPTS]
        assert [answer.cached for answer in answers] == [0, 0, 0]
        if change in {"version", "cpu", "salt"}:
            assert tokens(answers) == tokens(alone)
        engine.forget()
        again = [engine.generate(prompt)[0] for prompt in PROMPTS]
        assert tokens(again) == tokens(answers)
        # Blocks of another shape have no place on this server: the engine runs without it.
        fits = change not in {"dtype", "block"}
        assert [answer.cached for answer in again] == [
            ideal(prompt) if fits else 0 for prompt in PROMPTS
        ]


def test_a_server_killed_in_mid_load(llama: Path, tmp_path: Path, alone: list[Answer]) -> None:
    """Stopped, then killed, while a request waits for its blocks; then it comes back."""
    folder = tmp_path / "kvpool"
    server = ServerProcess(folder, 64 << 20)
    extra = {"run_dir": str(folder), "load_timeout_s": 60, "lookup_timeout_s": 1}
    with Engine(llama, extra) as engine:
        for prompt in PROMPTS:
            engine.generate(prompt)
        engine.forget()
        core = engine.llm.llm_engine
        sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)
        core.add_request("mid-load", {"prompt_token_ids": PROMPTS[2]}, sampling)
        (name,) = engine.connector._scheduler._tracked
        until(lambda: engine.connector._lookups.answer(name), "the answer of the lookup")
        server.signal(signal.SIGSTOP)
        core.step()  # orders the load
        waiting = [request.status.name for request in engine.scheduler.requests.values()]
        assert waiting == ["WAITING_FOR_REMOTE_KVS"]
        assert not core.step()
        server.kill()
        output = [done for _ in iter(core.has_unfinished_requests, False) for done in core.step()]
        assert tuple(output[-1].outputs[0].token_ids) == alone[2].tokens
        engine.forget()
        # Without a server requests are computed, and none is held up.
        for prompt, answer in zip(PROMPTS, alone, strict=True):
            found = engine.generate(prompt)[0]
            assert (found.tokens, found.cached) == (answer.tokens, 0)
            engine.forget()
        with ServerProcess(folder, 64 << 20):
            pool = engine.connector._pool
            pool.wait_connected(30)

            def warm() -> bool:
                engine.forget()
                found = engine.generate(PROMPTS[2])[0]
                assert found.tokens == alone[2].tokens
                return found.cached == ideal(PROMPTS[2])

            until(warm, "a hit on the new server")
            assert engine.free_blocks() + len(PROMPTS[2]) // BLOCK_TOKENS >= 200


def test_a_hung_server_holds_nobody_up(llama: Path, tmp_path: Path, alone: list[Answer]) -> None:
    """The scheduler is told to ask again, never made to wait; then patience is short."""
    folder = tmp_path / "kvpool"
    with (
        ServerProcess(folder, 64 << 20) as server,
        Engine(llama, {"run_dir": str(folder), "lookup_timeout_s": 0.1}) as engine,
    ):
        engine.generate(PROMPTS[0])
        engine.forget()
        server.signal(signal.SIGSTOP)
        scheduler = engine.connector._scheduler
        matched = scheduler.matched
        answers: list[tuple[int | None, bool]] = []

        def seen(request: object, local: int) -> tuple[int | None, bool]:
            answers.append(matched(request, local))
            return answers[-1]

        scheduler.matched = seen
        for _ in range(5):
            assert engine.generate(PROMPTS[0])[0].tokens == alone[0].tokens
            engine.forget()
        assert answers[0] == (None, False)
        assert answers[-1] == (0, False)
        assert engine.connector._lookups._failing
        server.signal(signal.SIGCONT)
