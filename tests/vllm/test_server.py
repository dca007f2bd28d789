"""An engine on a kvpool-server: over restarts, between processes, and when the server is lost."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.clock import ManualClock
from tests.server_process import ServerProcess
from tests.vllm.conftest import prompts
from tests.vllm.engines import (
    BLOCK_TOKENS,
    Answer,
    Engine,
    answers_of_another_process,
    free_port,
)
from tests.vllm.models import make_model
from tests.vllm.test_embedded import ideal, tokens
from tests.waiting import until

PROMPTS = prompts(180, 200, 321, seed=20)


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
    cold = answers_of_another_process(llama, {"server": str(run_dir)}, PROMPTS)
    assert tokens(cold) == tokens(alone)
    assert [answer.cached for answer in cold] == [0, 0, 0]
    for _ in range(2):
        with Engine(llama, {"server": str(run_dir)}) as engine:
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
    extra: dict[str, object] = {"server": str(run_dir)}
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
    with Engine(llama, {"server": str(folder)}) as engine:
        for prompt in PROMPTS:
            engine.generate(prompt)
        engine.forget()
        assert engine.lose_in_mid_load(server, PROMPTS[2]).tokens == alone[2].tokens
        engine.forget(settled=False)
        # Without a server requests are computed, and none is held up.
        for prompt, answer in zip(PROMPTS, alone, strict=True):
            found = engine.generate(prompt)[0]
            assert (found.tokens, found.cached) == (answer.tokens, 0)
            engine.forget(settled=False)
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
    """The scheduler is told to ask again, never made to wait; when patience is over, not once."""
    folder = tmp_path / "kvpool"
    with (
        ServerProcess(folder, 64 << 20) as server,
        Engine(llama, {"server": str(folder)}) as engine,
    ):
        engine.generate(PROMPTS[0])
        engine.forget()
        scheduler, lookups = engine.connector._scheduler, engine.connector._lookups
        matched = scheduler.matched
        answers: list[tuple[int | None, bool]] = []

        def seen(request: object, local: int) -> tuple[int | None, bool]:
            answers.append(matched(request, local))
            return answers[-1]

        scheduler.matched = seen
        clock = lookups._clock = ManualClock()  # how long a test takes decides nothing
        server.halt()
        engine.add(PROMPTS[0], "hung")
        for _ in range(3):
            assert not engine.llm.llm_engine.step()
        assert set(answers) == {(None, False)}
        until(lambda: lookups._begun is not None, "the lookup")
        clock.advance(60)
        assert engine.run_out().tokens == alone[0].tokens
        assert answers[-1] == (0, False)
        assert lookups._failing
        # From then on no request is told to wait, not once: each is asked about one time.
        answers.clear()
        for _ in range(20):
            engine.forget(settled=False)
            assert engine.generate(PROMPTS[0])[0].tokens == alone[0].tokens
        assert answers == [(0, False)] * 20
        server.signal(signal.SIGCONT)

        def warm() -> bool:
            engine.forget()
            found = engine.generate(PROMPTS[0])[0]
            assert found.tokens == alone[0].tokens
            return found.cached == ideal(PROMPTS[0])

        until(warm, "a hit on the server that answers again")


def test_a_pool_over_the_network(llama: Path, tmp_path: Path, alone: list[Answer]) -> None:
    """The same, with the address of a server of a ring instead of a folder."""
    address = f"127.0.0.1:{free_port()}"
    config = tmp_path / "pool.toml"
    config.write_text(
        f'[node]\nname = "one"\n[listen]\naddress = "{address}"\n[ring]\nannounce_interval_s = 0.2\n'
        f'[[ring.members]]\nname = "one"\naddress = "{address}"\n'
    )
    with (
        ServerProcess(tmp_path / "run", 64 << 20, "--config", str(config)) as server,
        Engine(llama, {"server": address}) as engine,
    ):
        assert tokens(engine.one_by_one(PROMPTS)) == tokens(alone)

        def warm() -> bool:  # once the directory knows all of it
            engine.forget()
            answers = engine.one_by_one(PROMPTS)
            assert tokens(answers) == tokens(alone)
            return [answer.cached for answer in answers] == [ideal(one) for one in PROMPTS]

        until(warm, "hits over the network")
        server.kill()
        for _ in range(2):
            engine.forget(settled=False)
            assert tokens(engine.one_by_one(PROMPTS)) == tokens(alone)
