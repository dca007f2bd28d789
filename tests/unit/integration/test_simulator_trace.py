"""Traces: what is refused, by line and field; spreading; generated loads."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import ConfigError, UsageError
from kvpool.integration.simulator.trace import (
    BLOCK_TOKENS,
    Arrival,
    at_speed,
    block_name,
    clock_step_s,
    parse_trace,
    read_trace,
    spread,
)
from kvpool.integration.simulator.workload import Workload, generated

GOOD: dict[str, Any] = {
    "timestamp": 3000,
    "input_length": 1000,
    "output_length": 7,
    "hash_ids": [0, 1],
}


def lines(*rows: dict[str, Any]) -> list[bytes]:
    return [json.dumps(row).encode() for row in rows]


def test_a_row_is_read() -> None:
    (first, second) = parse_trace(lines(GOOD, {**GOOD, "hash_ids": [0, 2]}), "t")
    assert first == Arrival(0, 3.0, 1000, 7, (block_name(0), block_name(1)))
    assert second.number == 1
    assert second.blocks[0] is first.blocks[0]  # a name is kept once, however often it comes


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"timestamp": -1}, "timestamp"),
        ({"timestamp": 2999}, "timestamp 2999 is before 3000"),
        ({"timestamp": 1.5}, "timestamp"),
        ({"timestamp": None}, "timestamp"),
        ({"timestamp": 10**13}, "timestamp"),
        ({"input_length": 0}, "input_length"),
        ({"input_length": 1025}, "makes 3 blocks"),
        ({"input_length": 10**30}, "input_length"),
        ({"output_length": 0}, "output_length"),
        ({"output_length": True}, "output_length"),
        ({"hash_ids": [0]}, "hash_ids has 1 ids"),
        ({"hash_ids": []}, "hash_ids has 0 ids"),
        ({"hash_ids": [0, -1]}, "hash_ids"),
        ({"hash_ids": [0, 2**63]}, "hash_ids"),
        ({"hash_ids": "01"}, "hash_ids"),
        ({"hash_ids": [5, 1]}, "hash_ids has 1 after 5, an earlier line after 0"),
        ({"hash_ids": [2, 2]}, "hash_ids"),
        ({"priority": 1}, "priority"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(change: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match="trace.jsonl, line 2") as raised:
        parse_trace(lines(GOOD, {**GOOD, **change}), "trace.jsonl")
    assert told in str(raised.value)


@pytest.mark.parametrize("field", GOOD)
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(UsageError, match=field):
        parse_trace(lines({name: value for name, value in GOOD.items() if name != field}), "t")


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b"7", b"null", b'{"timestamp": 1}}', b"\xff\xfe", b"\0"]
)
def test_a_line_that_is_no_object_is_named(line: bytes) -> None:
    with pytest.raises(UsageError, match="line 3"):
        parse_trace([*lines(GOOD), b"", line], "t")


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_no_bytes_raise_anything_else(rows: list[bytes]) -> None:
    try:
        parse_trace(rows, "t")
    except UsageError as error:
        assert "line" in str(error)


@pytest.mark.parametrize("text", [b"", b"\n", b"\n \n"])
def test_an_empty_trace_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(text)
    with pytest.raises(UsageError, match=r"t\.jsonl is empty"):
        read_trace(path)


@pytest.mark.parametrize("make", [lambda path: path / "none", lambda path: path])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    with pytest.raises(UsageError, match=str(tmp_path)):
        read_trace(make(tmp_path))


def arrivals(*stamps_ms: int) -> list[Arrival]:
    rows = [{**GOOD, "timestamp": stamp} for stamp in stamps_ms]
    return parse_trace(lines(*rows), "t")


def test_timestamps_of_one_step_are_spread_over_it() -> None:
    load = arrivals(*[0] * 50, *[3000] * 50, *[9000] * 50)
    assert clock_step_s(load) == 3.0
    spreaded = spread(load, seed=1)
    moments = [request.arrival_s for request in spreaded]
    assert moments == sorted(moments)
    assert [request.number for request in spreaded] == list(range(150))
    for first, start in ((0, 0.0), (50, 3.0), (100, 9.0)):
        part = moments[first : first + 50]
        assert all(start <= moment < start + 3.0 for moment in part)
        assert part[-1] - part[0] > 2.0  # over all of it
    assert spread(load, seed=1) == spreaded
    assert spread(load, seed=2) != spreaded


def test_fine_timestamps_stay() -> None:
    load = arrivals(0, 3, 11, 500, 501)
    assert all(
        abs(before.arrival_s - after.arrival_s) <= 0.001
        for before, after in zip(load, spread(load, 1), strict=True)
    )
    assert spread([], 1) == []


def test_speed() -> None:
    assert [request.arrival_s for request in at_speed(arrivals(0, 3000), 2)] == [0.0, 1.5]
    for speed in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="speed"):
            at_speed([], speed)


def test_a_generated_load_is_poisson_and_reuses() -> None:
    setting = Workload(request_count=4000, rate_per_s=5.0)
    load = list(generated(setting, seed=3))
    assert load == list(generated(setting, seed=3))
    assert load != list(generated(setting, seed=4))
    assert 0.9 < 4000 / load[-1].arrival_s / 5.0 < 1.1
    gaps = [after.arrival_s - before.arrival_s for before, after in pairwise(load)]
    assert 0.3 < sum(gap < 0.1 for gap in gaps) / len(gaps) < 0.5  # 1 - exp(-0.5) = 0.39
    seen: dict[bytes, bytes | None] = {}
    reused = 0
    for request in load:
        assert len(request.blocks) == -(-request.input_tokens // BLOCK_TOKENS)
        reused += request.blocks[0] in seen
        for parent, block in pairwise((None, *request.blocks)):
            assert block is not None
            assert seen.setdefault(block, parent) == parent
    assert 0.3 < reused / len(load) < 0.6


@pytest.mark.parametrize(
    ("key", "value"),
    [("reuse", 1.5), ("rate_per_s", 0.0), ("request_count", -1), ("turn_tokens", 0)],
)
def test_a_load_that_cannot_be_is_refused(key: str, value: float) -> None:
    settings: dict[str, Any] = {"request_count": 1, "rate_per_s": 1.0, key: value}
    with pytest.raises(ConfigError, match=key):
        Workload(**settings)
