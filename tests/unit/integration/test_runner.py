"""The runner gives what the model itself gives, and counts what it ran."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kvpool.errors import LayoutMismatchError, UsageError
from kvpool.events import ForwardRan, LayerComputed, ListSink
from kvpool.integration.runtime.model import SUPPORTED_TYPES, ModelSpec
from kvpool.integration.runtime.runner import Chunk, ModelRunner, Row
from kvpool.tiers.gpu import GpuTier
from tests.unit.integration.tiny import CONTEXT, EOS, VOCABULARY, tiny_model

SPEC = ModelSpec(
    name="tiny",
    kind="llama",
    num_layers=3,
    kv_heads=2,
    head_dim=8,
    dtype="float32",
    context_tokens=CONTEXT,
    vocabulary=VOCABULARY,
    eos_tokens=EOS,
    weights="0" * 64,
)
SLOTS = 48


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = torch.randint(6, VOCABULARY, (count,), generator=generator).tolist()
    return drawn


def logits_of(model: torch.nn.Module, sequence: list[int]) -> torch.Tensor:
    """Return the model's own logits at every position."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0]


@pytest.fixture(scope="module", params=SUPPORTED_TYPES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sink() -> ListSink:
    return ListSink()


@pytest.fixture
def runner(sink: ListSink) -> Iterator[ModelRunner]:
    with GpuTier(SPEC.layout(16), SLOTS) as tier:
        yield ModelRunner(tiny_model(), SPEC, tier, role="decode", sink=sink)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 16, 45, 60])
def test_chunks_and_decode_give_the_models_own_logits(kind: str, chunk: int) -> None:
    model, sequence = tiny_model(kind), tokens(60)
    expected = logits_of(model, sequence)
    with GpuTier(SPEC.layout(16), SLOTS) as tier:
        runner = ModelRunner(tiny_model(kind), SPEC, tier)
        slots = [7, 2, 30, 31]
        for start in range(0, 45, chunk):
            new = sequence[start : min(start + chunk, 45)]
            logits = runner.forward([Row(new, start, slots)])
            close(logits[0], expected[start + len(new) - 1])
        for position in range(45, 60):
            logits = runner.forward([Row([sequence[position]], position, slots)])
            close(logits[0], expected[position])


def test_rows_of_a_batch_do_not_touch_each_other(runner: ModelRunner) -> None:
    model = tiny_model()
    lengths = [3, 16, 31, 64, 90]
    rows = [tokens(length + 4, seed=length) for length in lengths]
    tables = [list(range(7 * row, 7 * row + 7))[:: 1 if row % 2 else -1] for row in range(5)]
    for length, row, table in zip(lengths, rows, tables, strict=True):
        runner.forward([Row(row[:length], 0, table)])
    expected = [logits_of(model, row) for row in rows]
    for step in range(4):
        logits = runner.forward(
            [
                Row([row[length + step]], length + step, table)
                for length, row, table in zip(lengths, rows, tables, strict=True)
            ]
        )
        for number, length in enumerate(lengths):
            close(logits[number], expected[number][length + step])


def test_one_forward_a_step_whatever_runs(runner: ModelRunner, sink: ListSink) -> None:
    for rows in (1, 3, 8):
        runner.forward([Row([9], 0, [row]) for row in range(rows)])
    runner.forward([Row(tokens(20), 0, [0, 1])])
    assert (runner.forwards, runner.tokens) == (4, 1 + 3 + 8 + 20)
    assert [(event.role, event.requests, event.tokens) for event in ran(sink)] == [
        ("decode", 1, 1),
        ("decode", 3, 3),
        ("decode", 8, 8),
        ("decode", 1, 20),
    ]


def ran(sink: ListSink) -> list[ForwardRan]:
    return [event for event in sink.events if isinstance(event, ForwardRan)]


def test_layers_are_announced_before_they_end_and_timed(
    runner: ModelRunner, sink: ListSink
) -> None:
    ended: list[int] = []

    def announced(layer: int) -> None:
        computed = [event for event in sink.events if isinstance(event, LayerComputed)]
        ended.append(len(computed))
        assert layer == len(ended) - 1

    row = Row(tokens(20), 0, [0, 1])
    runner.forward([row], on_layer=announced, traced=Chunk("r1", 2))
    assert ended == [0, 1, 2]  # layer k is announced when k layers have ended
    events = [event for event in sink.events if isinstance(event, LayerComputed)]
    assert [(event.request, event.chunk, event.layer) for event in events] == [
        ("r1", 2, 0),
        ("r1", 2, 1),
        ("r1", 2, 2),
    ]
    times = [time for event in events for time in (event.began_ns, event.at_ns)]
    assert times == sorted(times)
    runner.forward([row])
    assert len([event for event in sink.events if isinstance(event, LayerComputed)]) == 3


def test_what_a_hook_raises_ends_the_forward_and_the_next_one_runs(runner: ModelRunner) -> None:
    row = Row(tokens(20), 0, [0, 1])
    expected = runner.forward([row])

    def refuse(layer: int) -> None:
        if layer == 1:
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        runner.forward([row], on_layer=refuse)
    assert runner.forwards == 1
    torch.testing.assert_close(runner.forward([row]), expected, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "at least one row"),
        ([Row([], 0, [0])], "at least one token"),
        ([Row([1], 0, [0]), Row([1, 2], 0, [1])], "same number"),
        ([Row([1] * 17, 0, [0])], "do not hold"),
        ([Row([1], 16, [0])], "do not hold"),
        ([Row([1], -1, [0])], "pass the model's"),
        ([Row([1], CONTEXT, list(range(20)))], "pass the model's"),
        ([Row([VOCABULARY], 0, [0])], "token is not within"),
        ([Row([-1], 0, [0])], "token is not within"),
        ([Row([1], 0, [SLOTS])], "slot is not within"),
        ([Row([1], 0, [-1])], "slot is not within"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    runner: ModelRunner, rows: list[Row], reason: str
) -> None:
    before = runner.tier.arena.clone()
    with pytest.raises(UsageError, match=reason):
        runner.forward(rows)
    assert runner.forwards == 0
    assert torch.equal(runner.tier.arena, before)


def test_a_tier_of_another_model_is_refused() -> None:
    other = replace(SPEC, kv_heads=1)
    with GpuTier(other.layout(16), 2) as tier, pytest.raises(LayoutMismatchError):
        ModelRunner(tiny_model(), SPEC, tier)
