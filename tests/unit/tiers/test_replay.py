"""The replayer against least recently used written as plainly as can be, and by hand."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.cli.bench_policy import cases, plain_lru, read_trace
from kvpool.errors import UsageError
from kvpool.tiers.eviction import LRUPolicy
from kvpool.tiers.replay import TraceRequest, number_key, replay
from kvpool.tiers.reuse import ReusePolicy


def requests_of(*runs: list[int]) -> list[TraceRequest]:
    return [
        TraceRequest(at_s=float(at), keys=[number_key(number) for number in run])
        for at, run in enumerate(runs)
    ]


# Prefixes of a few chains that branch, as prompts do: block n's parent is n // 2.
@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    number = draw(st.integers(1, 63))
    chain: list[int] = []
    while number:
        chain.append(number)
        number //= 2
    return chain[::-1]


@given(runs=st.lists(prompts(), max_size=40), capacity=st.integers(7, 20))
def test_lru_without_parents_is_exact(runs: list[list[int]], capacity: int) -> None:
    requests = requests_of(*runs)
    counts = replay(LRUPolicy(), requests, capacity, parents=False)
    assert counts.hit_rate == plain_lru(requests, capacity)


@given(runs=st.lists(prompts(), max_size=40), capacity=st.integers(1, 80))
def test_every_policy_finds_all_if_there_is_room_for_all(
    runs: list[list[int]], capacity: int
) -> None:
    requests, seen = requests_of(*runs), set[int]()
    for run in runs:
        seen.update(run)
    best = replay(LRUPolicy(), requests, 1000)
    assert best.asked - best.found == len(seen)
    for policy in (LRUPolicy(), ReusePolicy(capacity)):
        assert replay(policy, requests, capacity).found <= best.found
    assert replay(ReusePolicy(1000), requests, 1000) == best


def test_only_leading_blocks_count_and_only_from_where_it_is_said() -> None:
    requests = requests_of([1, 2, 3], [1, 9, 3], [1, 2, 3])
    counts = replay(LRUPolicy(), requests, 10)
    assert (counts.found, counts.asked) == (0 + 1 + 3, 9)
    counts = replay(LRUPolicy(), requests, 10, count_from=2)
    assert (counts.found, counts.asked, counts.hit_rate) == (3, 3, 1.0)


def test_a_prompt_longer_than_the_pool_is_cut_not_refused() -> None:
    requests = requests_of([1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    assert replay(LRUPolicy(), requests, 3).found == 3


def test_a_trace_is_read_and_its_rows_agree_with_each_other(tmp_path: Path) -> None:
    path = tmp_path / "small_trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 3000, "input_length": 1024, "output_length": 3, "hash_ids": [0, 1]}\n'
    )
    first, second = read_trace(path)
    assert (first.at_s, first.last_share, second.at_s, second.last_share) == (0, 76 / 512, 3, 1)
    rows = {case.name: case for case in cases(True, path)}
    assert list(rows) == ["policy.lru.small.5859", "policy.own.small.5859", "policy.speed.small"]
    for name in ("policy.lru.small.5859", "policy.own.small.5859"):
        with rows[name].open(lambda: 0.0) as sides:
            assert sides.value() == sides.reference()


@pytest.mark.parametrize("line", ["{}", "not JSON", '{"timestamp": 0, "hash_ids": [-1]}'])
def test_what_is_no_trace_is_refused_by_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1, "hash_ids": [0]}\n' + line)
    with pytest.raises(UsageError, match="line 2"):
        read_trace(path)
    with pytest.raises(UsageError, match="--trace"):
        cases(True)
