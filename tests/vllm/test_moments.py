"""Aborts and resets at every moment of a request: nothing leaks, nothing is wrong.

Gates hold loads and stores where they are, so that each moment is met however fast the machine is.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Count
from tests.vllm.conftest import prompts
from tests.vllm.engines import Engine
from tests.vllm.test_embedded import at_rest, tokens
from tests.waiting import until

# No test holds one so long: it ends a test that hangs.
GATE_S = 120.0
PARKED = "WAITING_FOR_REMOTE_KVS"


@pytest.fixture(scope="module")
def engine(llama: Path) -> Iterator[Engine]:
    with Engine(llama, {"dram": "64MiB"}) as engine:
        yield engine


class Gate:
    """Holds every call of a function while it is closed. Open at first."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self._open = threading.Event()
        self._open.set()
        inner: Callable[..., Any] = getattr(owner, name)

        def held(*args: Any, **fields: Any) -> Any:
            assert self._open.wait(GATE_S)
            return inner(*args, **fields)

        patch.setattr(owner, name, held)

    def set(self, open_: bool) -> None:
        if open_:
            self._open.set()
        else:
            self._open.clear()


def moment(engine: Engine, name: str) -> str:
    """Say where a request is: a word of vLLM's, or a finer one."""
    request = engine.scheduler.requests.get(name)
    if request is None:
        return "over"
    if request.status.name == "RUNNING":
        return "decoding" if request.num_output_tokens else "computing its prompt"
    if request.status.name == "WAITING":
        answered = engine.connector._lookups.answer(name) is not None
        return "found" if answered else "looked for"
    if name in engine.scheduler.finished_recving_kv_req_ids:
        return "loaded"
    return str(request.status.name)


def wait_for_answers(engine: Engine, names: list[str]) -> None:
    """Wait until the pool has said what it has of requests that were just handed in."""
    lookups = engine.connector._lookups
    until(lambda: all(lookups.answer(name) is not None for name in names), "the answers")


def test_aborts_at_any_moment(
    engine: Engine, count: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(13)
    asked = prompts(300, 310, 320, 200, 90, seed=14, shared=64)
    wanted = tokens(engine.one_by_one(asked))
    engine.settle()
    core = engine.llm.llm_engine
    gates = [Gate(monkeypatch, engine.connector._pool, name) for name in ("match", "lease")]
    alive: list[tuple[str, str]] = []
    met = Counter[str]()
    done = 0
    while done < count(1000, 10_000):
        prompt = source.choice(asked) if source.random() < 0.7 else prompts(700, seed=done)[0]
        for gate in gates:
            gate.set(source.random() < 0.7)
        outer = f"abort-{done}-{len(alive)}"
        alive.append((outer, engine.add(prompt, outer, tokens=30)))
        if gates[0]._open.is_set() and source.random() < 0.8:
            wait_for_answers(engine, [alive[-1][1]])
        for _ in range(source.choice((0, 1, 1, 1, 2, 3))):
            core.step()
        if source.random() < 0.2:
            engine.llm.reset_prefix_cache()  # refused while blocks are in use: no harm
        while alive and (len(alive) > 5 or source.random() < 0.6):
            outer, inner = alive.pop(source.choice((-1, source.randrange(len(alive)))))
            met[moment(engine, inner)] += 1
            held = moment(engine, inner) == PARKED and not gates[1]._open.is_set()
            free = engine.free_blocks()
            core.abort_request([outer])
            if held:  # the load may still write into the blocks: they are nobody's yet
                assert engine.free_blocks() == free
                met["in the middle of its load"] += 1
            done += 1
    for gate in gates:
        gate.set(True)
    core.abort_request([outer for outer, _ in alive])
    at_rest(engine)
    moments = (
        "looked for",
        "found",
        "in the middle of its load",
        "computing its prompt",
        "decoding",
    )
    few = [name for name in moments if met[name] < 10]
    assert not few, met
    assert tokens(engine.one_by_one(asked)) == wanted
    at_rest(engine)


def test_resets_at_any_moment(
    engine: Engine, count: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the engine's cache, of the pool, of both: running requests start anew, stores are in flight."""
    asked = prompts(300, 200, 90, seed=23, shared=64)
    wanted = tokens(engine.one_by_one(asked))
    source = random.Random(24)
    core = engine.llm.llm_engine
    copies = Gate(monkeypatch, engine.connector._pool, "_copy_in")
    saving = engine.worker_side.saving_slots
    met = Counter[str]()
    for number in range(count(50, 500)):
        engine.forget()
        copies.set(source.random() < 0.5)
        inner = [engine.add(prompt, f"{number}-{at}") for at, prompt in enumerate(asked)]
        if source.random() < 0.8:
            wait_for_answers(engine, inner)
        outputs = [done for _ in range(source.randrange(6)) for done in core.step()]
        moments = [moment(engine, name) for name in inner]
        met.update(moments)
        met["stores in flight"] += saving.free < saving.count
        engine.llm.reset_prefix_cache(
            # vLLM cannot while a load is under way, or over and not told the request.
            reset_running_requests=not {PARKED, "loaded"} & set(moments),
            reset_connector=source.random() < 0.5,
        )
        copies.set(True)
        outputs += [done for _ in iter(core.has_unfinished_requests, False) for done in core.step()]
        ends = sorted((one.request_id, one) for one in outputs if one.finished)
        assert [tuple(one.outputs[0].token_ids) for _, one in ends] == wanted
    at_rest(engine)
    met[PARKED] += met["loaded"]
    assert min(met[name] for name in ("stores in flight", PARKED, "decoding")) >= 3, met
