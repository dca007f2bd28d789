"""Parts of the simulator alone: network, store, decode worker, prefill worker."""

import math
from dataclasses import replace
from typing import Any

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import UsageError
from kvpool.integration.conductor.snapshot import Request
from kvpool.integration.simulator.cache import NodeCache
from kvpool.integration.simulator.decoding import DecodeWorker
from kvpool.integration.simulator.job import Job, longest_gaps_mean
from kvpool.integration.simulator.machine import papers_machine
from kvpool.integration.simulator.network import Network
from kvpool.integration.simulator.prefilling import PrefillWorker, Prompt
from kvpool.integration.simulator.setting import ClusterSetting
from kvpool.integration.simulator.trace import BLOCK_TOKENS, Arrival, block_name
from kvpool.tiers.eviction import LRUPolicy

COST = papers_machine()


def job(number: int = 0, tokens: int = 1000, output: int = 10, first_block: int = 0) -> Job:
    blocks = tuple(block_name(first_block + i) for i in range(-(-tokens // BLOCK_TOKENS)))
    request = Arrival(number, 0.0, tokens, output, blocks)
    return Job(
        request, Request(number=number, tokens=tokens, chain=b"".join(blocks), output_tokens=output)
    )


def ends_of(
    network: Network, clock: simpy.Environment, sends: list[tuple[int, int, float]]
) -> list[float]:
    ends = [math.nan] * len(sends)

    def watch(index: int, source: int, target: int, size: float) -> None:
        done = network.send(source, target, size).done
        assert done.callbacks is not None
        done.callbacks.append(lambda _: ends.__setitem__(index, clock.now))

    for index, (source, target, size) in enumerate(sends):
        watch(index, source, target, size)
    clock.run()
    return ends


@pytest.mark.parametrize(
    ("sends", "expected"),
    [
        ([(0, 1, 100)], [10]),
        ([(0, 1, 100), (0, 2, 100)], [20, 20]),  # one port out, shared
        ([(0, 2, 100), (1, 2, 100)], [20, 20]),  # one port in, shared
        ([(0, 1, 100), (2, 3, 100)], [10, 10]),  # nothing shared
        ([(0, 1, 50), (0, 2, 100)], [10, 15]),  # the rest has the port for itself
        ([(0, 0, 100), (0, 1, 0)], [0, 0]),
    ],
)
def test_ports_are_shared_evenly(
    sends: list[tuple[int, int, float]], expected: list[float]
) -> None:
    clock = simpy.Environment()
    network = Network(clock, 10.0)
    assert ends_of(network, clock, sends) == pytest.approx(expected)
    assert network.under_way() == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(4, 6), st.floats(1, 1000)), max_size=12))
def test_no_port_carries_more_than_it_can(sends: list[tuple[int, int, float]]) -> None:
    clock = simpy.Environment()
    ends = ends_of(Network(clock, 10.0), clock, sends)
    for side in (0, 1):
        for node in {send[side] for send in sends}:
            mine = [
                (end, send[2]) for end, send in zip(ends, sends, strict=True) if send[side] == node
            ]
            assert max(end for end, _ in mine) >= sum(size for _, size in mine) / 10.0 - 1e-6
    assert all(end >= send[2] / 10.0 - 1e-6 for end, send in zip(ends, sends, strict=True))


def test_a_port_without_width_is_refused() -> None:
    for width in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(UsageError, match="port_bytes_per_s"):
            Network(simpy.Environment(), width)


class Heard:
    """Keeps what a store tells."""

    def __init__(self) -> None:
        self.here: set[bytes] = set()

    def entered(self, blocks: object) -> None:
        assert isinstance(blocks, list)
        self.here.update(blocks)

    def left(self, blocks: object) -> None:
        assert isinstance(blocks, list)
        self.here.difference_update(blocks)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.booleans()), max_size=40))
def test_a_store_keeps_its_size_its_pins_and_its_word(steps: list[tuple[int, int, bool]]) -> None:
    heard = Heard()
    store = NodeCache(8, LRUPolicy, heard)
    pins: list[tuple[bytes, ...]] = []
    for now, (family, length, pin) in enumerate(steps):
        chain = tuple(block_name(family * 100 + i) for i in range(length))
        if pin and len(pins) < 2:
            pins.append(tuple(store.pin(chain, now)))
        else:
            count = store.admit(chain, now)
            assert store.match(chain) >= count
        assert len(store) <= 8
        assert all(block in heard.here for held in pins for block in held)
        assert len(heard.here) == len(store)
        assert store.pinned == sum(map(len, pins))


def test_the_least_recently_used_leaf_goes_first() -> None:
    store = NodeCache(4, LRUPolicy, None)
    a, b, c = (tuple(block_name(10 * i + j) for j in range(2)) for i in range(3))
    store.admit(a, 0)
    store.admit(b, 1)
    store.admit(a, 2)
    store.admit(c, 3)
    assert [store.match(chain) for chain in (a, b, c)] == [2, 0, 2]
    held = store.pin(a, 4)
    assert store.admit(tuple(block_name(100 + i) for i in range(5)), 5) == 2  # pins leave no room
    assert store.match(a) == 2
    store.unpin(held)
    with pytest.raises(UsageError, match="cache_blocks"):
        NodeCache(0, LRUPolicy, None)


def test_the_longest_tenth_of_gaps() -> None:
    assert longest_gaps_mean([]) == 0.0
    assert longest_gaps_mean([(0.1, 3)]) == pytest.approx(0.1)
    assert longest_gaps_mean([(0.01, 18), (0.5, 1), (0.3, 1)]) == pytest.approx(0.4)
    assert longest_gaps_mean([(0.01, 18), (0.5, 1), (0.3, 2)]) == pytest.approx(1.1 / 3)


def decode_worker(
    clock: simpy.Environment,
    ended: list[tuple[int, float, float]],
    **limits: Any,  # noqa: ANN401 - of ClusterSetting
) -> DecodeWorker:
    def joined(one: Job) -> None:
        one.first_token_s = clock.now

    return DecodeWorker(
        clock,
        COST,
        replace(ClusterSetting(), **limits),
        joined=joined,
        advanced=lambda _: None,
        ended=lambda one: ended.append((one.request.number, clock.now, one.tbt_s)),
    )


def test_one_request_alone_takes_its_steps() -> None:
    clock, ended = simpy.Environment(), list[tuple[int, float, float]]()
    worker = decode_worker(clock, ended)
    worker.join(job(tokens=1000, output=301))
    clock.run()
    ((_, end_s, tbt_s),) = ended
    expected = sum(COST.decode_step_s(1, 1001 + step) for step in range(300))
    assert end_s == pytest.approx(expected, rel=1e-6)
    assert tbt_s == pytest.approx(COST.decode_step_s(1, 1290), rel=1e-3)
    assert (len(worker), worker.held_tokens, worker.context_tokens) == (0, 0, 0)


def test_who_joins_waits_for_the_step_and_slows_the_others() -> None:
    clock, ended = simpy.Environment(), list[tuple[int, float, float]]()
    worker = decode_worker(clock, ended)
    first, second = job(0, output=200), job(1, output=50)
    worker.join(first)
    step_s = COST.decode_step_s(1, 1001)
    clock.run(until=10.5 * step_s)
    worker.join(second)
    clock.run()
    assert second.first_token_s == pytest.approx(11 * step_s, rel=1e-3)
    assert [number for number, _, _ in ended] == [1, 0]
    both_s = COST.decode_step_s(2, 2020)
    assert second.tbt_s == pytest.approx(both_s, rel=1e-2)
    assert first.tbt_s == pytest.approx(both_s, rel=1e-2)  # 49 of its 199 gaps: over a tenth
    assert (worker.held_tokens, worker.context_tokens) == (0, 0)


@pytest.mark.parametrize(
    "limits", [{"running_max": 1}, {"decode_tokens_max": 1500}, {"held_tbt_s": 0.028}]
)
def test_who_finds_no_room_waits_in_turn(limits: dict[str, float]) -> None:
    clock, ended = simpy.Environment(), list[tuple[int, float, float]]()
    worker = decode_worker(clock, ended, **limits)
    jobs = [job(number, output=20) for number in range(3)]
    for one in jobs:
        worker.join(one)
        assert worker.running == 1
    clock.run()
    assert [number for number, _, _ in ended] == [0, 1, 2]
    assert jobs[1].first_token_s == pytest.approx(ended[0][1])


def compute(
    setting: ClusterSetting, cached: int, copy_s: float | None, port: float = 87e9
) -> tuple[float, float]:
    """Run one prompt of 20,000 tokens; return when it was computed and when its KV had arrived."""
    clock = simpy.Environment()
    network = Network(clock, port)
    computed: list[Prompt] = []
    worker = PrefillWorker(clock, COST, network, setting, computed.append)
    copying = None if copy_s is None else clock.timeout(copy_s)
    one = job(tokens=20_000)
    worker.submit(Prompt(one, 0, 1, lambda: cached, copying))
    assert len(worker) == 1
    arrived_s = math.nan
    while clock.peek() < math.inf:
        clock.step()
        if (
            math.isnan(arrived_s)
            and computed
            and all(s.done.processed for s in computed[0].shipments)
        ):
            arrived_s = clock.now
    assert len(worker) == 0
    assert len(computed[0].shipments) == -(-(20_000 - cached) // setting.chunk_tokens)
    assert one.cached_tokens == cached
    return one.computed_s, arrived_s


def test_chunks_add_up_and_are_shipped_as_they_are_computed() -> None:
    whole_s = COST.prefill_s(20_000, 0)
    for chunk in (1000, 8192, 30_000):
        computed_s, arrived_s = compute(ClusterSetting(chunk_tokens=chunk), 0, None)
        assert computed_s == pytest.approx(whole_s)
        assert arrived_s == pytest.approx(whole_s)  # the link is much faster than the machine
    narrow = 20_000 * COST.kv_bytes_per_token / (2 * whole_s)  # shipping takes twice as long
    _, streamed_s = compute(ClusterSetting(), 0, None, narrow)
    _, after_s = compute(ClusterSetting(layer_wise=False), 0, None, narrow)
    assert streamed_s == pytest.approx(2 * whole_s)
    assert after_s > streamed_s * 1.1


def test_a_prefix_on_its_way_is_waited_for_layer_by_layer() -> None:
    layered, serial = ClusterSetting(), ClusterSetting(layer_wise=False)
    run_s = COST.prefill_s(20_000, 10_000)
    assert compute(layered, 10_000, run_s / 2)[0] == pytest.approx(run_s)
    assert compute(serial, 10_000, run_s / 2)[0] == pytest.approx(1.5 * run_s)
    assert compute(layered, 10_000, 3 * run_s)[0] == pytest.approx(3 * run_s + run_s / 80)
