"""The stack over a real SSD tier: flush, promotion, durability, and a disk that does not answer."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvpool.arena import Arena
from kvpool.block import HASH_BYTES, BlockHash, new_incarnation
from kvpool.errors import CapacityError, ClosedError, UnavailableError
from kvpool.memory import BlockView, Crcs, Span, copy_blocks
from kvpool.testing.blocks import SMALL_LAYOUT, key, payload, read, view_of, write
from kvpool.testing.slow_store import FaultyStore
from kvpool.tiers.dram import DramTier
from kvpool.tiers.flusher import FlushLimits, rest_s
from kvpool.tiers.ssd import SsdTier
from kvpool.tiers.stack import StackTier, stats_of
from kvpool.tiers.tokens import TokenRows
from tests.waiting import until

BLOCK = SMALL_LAYOUT.block_bytes
SLOTS = 8
PATIENCE_S = 60.0
LIMITS = FlushLimits(
    bytes_s=0,
    batch_bytes=4 * BLOCK,
    timeout_s=PATIENCE_S,
    backlog_bytes_max=64 * BLOCK,
    high_bytes=SLOTS * BLOCK,
    low_bytes=SLOTS * BLOCK,
)


def open_stack(folder: Path, limits: FlushLimits = LIMITS, ssd_slots: int = 64) -> StackTier:
    fast = DramTier(Arena(SMALL_LAYOUT, SLOTS, new_incarnation()))
    slow = FaultyStore(SsdTier(folder, SMALL_LAYOUT, ssd_slots, threads=2, timeout_s=PATIENCE_S))
    return StackTier(fast, slow, limits, durable_bytes_max=16 * BLOCK)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[StackTier]:
    with open_stack(tmp_path) as stack:
        yield stack


def disk(stack: StackTier) -> FaultyStore:
    assert isinstance(stack.slow, FaultyStore)
    return stack.slow


def keys(*numbers: int) -> bytes:
    return b"".join(key(number) for number in numbers)


def put(stack: StackTier, numbers: range) -> None:
    """Store a chain of blocks; block ``n`` has the bytes of seed ``n``, and ``n - 1`` above it."""
    for number in numbers:
        above = key(number - 1) if number else None
        write(stack, key(number), payload(SMALL_LAYOUT, 1, number), above)


def put_run(stack: StackTier, count: int) -> None:
    """Store the same blocks in one call, so that they are few batches, and as few pauses."""
    blocks = np.concatenate([payload(SMALL_LAYOUT, 1, number) for number in range(count)])
    slots = stack.reserve_run(count)
    crcs = copy_blocks(stack.view(slots, writable=True), view_of(SMALL_LAYOUT, blocks))
    stack.settle_run(slots)
    assert stack.commit_run(slots, keys(*range(count)), None, crcs) == count


def flushed(stack: StackTier) -> None:
    assert stack.flusher.wait_idle(PATIENCE_S)


def put_down(stack: StackTier, count: int) -> None:
    """Store a chain that is longer than DRAM, each block when the one before is below."""
    for number in range(count):
        put(stack, range(number, number + 1))
        flushed(stack)


def assert_served(stack: StackTier, numbers: range) -> None:
    slots = stack.pin(keys(*numbers))
    want = np.concatenate([payload(SMALL_LAYOUT, 1, number) for number in numbers])
    assert len(slots) == len(numbers)
    np.testing.assert_array_equal(read(stack, slots), want)
    stack.unpin(slots)


def test_what_left_dram_is_matched_and_promoted(stack: StackTier) -> None:
    put_down(stack, 20)
    assert stack.fast.evict(SLOTS) == SLOTS
    assert stack.match(keys(*range(21))) == 20
    assert len(stack.pin(keys(0))) == 0
    assert stack.promote(keys(*range(SLOTS)), wait_s=PATIENCE_S) == SLOTS
    assert_served(stack, range(SLOTS))
    assert stack.counts().promoted == SLOTS


def test_a_chain_that_lies_in_both_tiers_is_matched_whole_and_only_the_rest_is_read(
    stack: StackTier,
) -> None:
    put(stack, range(6))
    flushed(stack)
    assert stack.fast.evict(3) == 3  # the end of the chain goes first
    assert (stack.fast.match(keys(*range(6))), stack.match(keys(*range(6)))) == (3, 6)
    assert stack.promote(keys(*range(6)), wait_s=PATIENCE_S) == 6
    assert stack.counts().promoted == 3
    assert_served(stack, range(6))


def test_blocks_in_turn_in_both_tiers_are_promoted(stack: StackTier) -> None:
    """Fragments: each block of the chain has a parent that is elsewhere."""
    for number in range(6):
        write(stack, key(number), payload(SMALL_LAYOUT, 1, number))
    flushed(stack)
    for number in (1, 3, 4):
        assert stack.fast.drop(key(number), "invalid")
    assert stack.match(keys(*range(6))) == 6
    assert stack.promote(keys(*range(6)), wait_s=PATIENCE_S) == 6
    assert_served(stack, range(6))


def test_promotion_does_not_evict_what_it_brought_up(stack: StackTier) -> None:
    put_down(stack, 20)
    assert stack.promote(keys(*range(20)), wait_s=PATIENCE_S) == SLOTS
    assert_served(stack, range(SLOTS))


def test_a_put_never_waits_for_a_disk_that_hangs(stack: StackTier) -> None:
    disk(stack).open_gate.clear()
    put(stack, range(3 * SLOTS))  # a put that waited would stay here
    until(lambda: disk(stack).waiting == 1)
    assert stack.stats().ready == SLOTS
    disk(stack).open_gate.set()
    flushed(stack)


def test_a_stack_full_of_pins_refuses_at_once_while_the_disk_hangs(stack: StackTier) -> None:
    disk(stack).open_gate.clear()
    put(stack, range(SLOTS))
    slots = stack.pin(keys(*range(SLOTS)))
    with pytest.raises(CapacityError):
        stack.reserve()
    stack.unpin(slots)
    disk(stack).open_gate.set()


def test_a_disk_that_fails_is_tried_again(stack: StackTier) -> None:
    disk(stack).failing.set()
    put(stack, range(4))
    until(lambda: stack.counts().flush.failed > 0)
    assert stack.counts().flush.flushed == 0
    disk(stack).failing.clear()
    flushed(stack)
    assert stack.counts().flush.flushed == 4
    stack.fast.evict(SLOTS)
    assert stack.promote(keys(*range(4)), wait_s=PATIENCE_S) == 4
    assert_served(stack, range(4))


def test_what_a_disk_did_not_take_keeps_its_turn_and_its_parent(tmp_path: Path) -> None:
    class Failing(FaultyStore):
        """Takes two blocks, and then none until the test says so."""

        written = b""

        def write(
            self,
            keys: bytes,
            parent: BlockHash | None,
            source: BlockView,
            *,
            crcs: Crcs | None = None,
            tokens: TokenRows | None = None,
            deadline_s: float,
        ) -> int:
            count = super().write(
                keys, parent, source, crcs=crcs, tokens=tokens, deadline_s=deadline_s
            )
            if not self.written:
                self.failing.set()
            self.written += keys[: count * HASH_BYTES]
            return count

    inner = SsdTier(tmp_path, SMALL_LAYOUT, 64, threads=2, timeout_s=PATIENCE_S)
    slow = Failing(inner)
    slow.write_blocks_max = 2
    fast = DramTier(Arena(SMALL_LAYOUT, SLOTS, new_incarnation()))
    with StackTier(fast, slow, LIMITS, durable_bytes_max=16 * BLOCK) as stack:
        put_run(stack, SLOTS)
        until(lambda: stack.counts().flush.failed > 0)
        slow.failing.clear()
        flushed(stack)
        assert slow.written == keys(*range(SLOTS))
        names, parents = inner.blocks()
        above = {
            names[at : at + HASH_BYTES]: parents[at : at + HASH_BYTES]
            for at in range(0, len(names), HASH_BYTES)
        }
        assert [above[key(number)] for number in range(1, SLOTS)] == [
            key(number) for number in range(SLOTS - 1)
        ]


def test_a_disk_that_takes_a_few_at_a_time_gets_all(stack: StackTier) -> None:
    disk(stack).write_blocks_max = 1
    put(stack, range(6))
    flushed(stack)
    assert stack.slow.match(keys(*range(6))) == 6


def test_a_full_backlog_lets_the_oldest_go_and_counts_them(tmp_path: Path) -> None:
    with open_stack(tmp_path, replace(LIMITS, backlog_bytes_max=4 * BLOCK)) as stack:
        disk(stack).open_gate.clear()
        put(stack, range(1))
        until(lambda: disk(stack).waiting == 1)
        put(stack, range(1, 8))
        counts = stack.counts().flush
        assert counts.backlog <= 4 and counts.skipped >= 3
        disk(stack).open_gate.set()
        flushed(stack)
        counts = stack.counts().flush
        assert counts.flushed + counts.skipped == 8 and counts.backlog == 0
        assert stack.slow.match(key(7)) == 1


def test_what_is_evicted_before_its_turn_is_counted_as_lost(stack: StackTier) -> None:
    disk(stack).open_gate.clear()
    put(stack, range(1))
    until(lambda: disk(stack).waiting == 1)
    put(stack, range(1, 4))
    stack.fast.evict(SLOTS)  # block 0 is being written, which nothing may overwrite
    disk(stack).open_gate.set()
    flushed(stack)
    counts = stack.counts().flush
    assert (counts.flushed, counts.lost) == (1, 3)
    assert [stack.match(key(number)) for number in range(4)] == [1, 0, 0, 0]


def test_a_block_that_turned_bad_in_dram_does_not_get_to_the_disk(stack: StackTier) -> None:
    disk(stack).open_gate.clear()
    put(stack, range(1))
    until(lambda: disk(stack).waiting == 1)
    put(stack, range(1, 3))
    slots = stack.fast.hold(keys(1))
    view = stack.fast.view(slots, writable=False)
    at = view.base + int(view.block_ids[0]) * view.block_stride
    Span(at, BLOCK, view.owner).view()[0] ^= 1
    stack.fast.unpin(slots)
    disk(stack).open_gate.set()
    flushed(stack)
    assert [stack.match(key(number)) for number in range(3)] == [1, 0, 1]
    assert stack.stats().corruptions == 1


def test_a_promotion_ends_at_its_deadline_with_what_came(stack: StackTier) -> None:
    put(stack, range(6))
    flushed(stack)
    stack.fast.evict(4)
    disk(stack).open_gate.clear()
    assert stack.promote(keys(*range(6)), wait_s=0.05) == 2
    counts = stack.counts()
    assert counts.promotions_failed == 4 and counts.promoted == 0
    stats = stack.stats()
    assert (stats.reserved, stats.quarantined, stats.pins) == (0, 0, 0)
    assert stack.slow.stats().pins == 0
    disk(stack).open_gate.set()
    assert stack.promote(keys(*range(6)), wait_s=PATIENCE_S) == 6
    assert_served(stack, range(6))


def test_a_promotion_that_fails_is_a_miss_and_leaves_nothing_behind(stack: StackTier) -> None:
    put(stack, range(6))
    flushed(stack)
    stack.fast.evict(4)
    disk(stack).failing.set()
    assert stack.promote(keys(*range(6)), wait_s=PATIENCE_S) == 2
    stats = stack.stats()
    assert (stats.reserved, stats.quarantined, stats.pins) == (0, 0, 0)
    assert stack.slow.stats().pins == 0


def test_what_would_come_too_late_is_refused_unread(stack: StackTier) -> None:
    put(stack, range(6))
    flushed(stack)
    stack.fast.evict(6)
    assert stack.promote(keys(0), wait_s=PATIENCE_S) == 1  # how quick the disk is, is known now
    reads = disk(stack).reads
    assert stack.promote(keys(*range(6)), wait_s=1e-9) == 1
    assert disk(stack).reads == reads
    assert stack.counts().promotions_refused == 5


def test_a_flipped_byte_on_the_disk_is_a_miss_and_the_rest_is_served(
    stack: StackTier, tmp_path: Path
) -> None:
    put(stack, range(4))
    flushed(stack)
    stack.fast.evict(SLOTS)
    want = payload(SMALL_LAYOUT, 1, 2).tobytes()
    hit = 0
    for path in tmp_path.rglob("*"):
        if path.is_file() and (at := (content := path.read_bytes()).find(want)) >= 0:
            with path.open("r+b") as file:
                file.seek(at + 17)
                file.write(bytes([content[at + 17] ^ 1]))
            hit += 1
    assert hit == 1
    assert stack.promote(keys(*range(4)), wait_s=PATIENCE_S) == 2
    assert_served(stack, range(2))
    assert stack.match(keys(*range(4))) == 2
    assert stack.match(keys(3)) == 1


def test_durable_is_the_whole_chain_from_its_root(stack: StackTier) -> None:
    disk(stack).failing.set()
    put(stack, range(6))
    with pytest.raises(UnavailableError):
        stack.make_durable(keys(*range(6)), deadline_s=PATIENCE_S)
    disk(stack).failing.clear()
    assert stack.make_durable(keys(*range(6)), deadline_s=PATIENCE_S) == 6
    assert stack.slow.durable(keys(*range(6))) == 6
    assert stack.make_durable(keys(*range(8)), deadline_s=PATIENCE_S) == 6


def test_a_chain_whose_root_is_nowhere_is_not_durable(stack: StackTier) -> None:
    put(stack, range(1, 4))
    assert stack.make_durable(keys(*range(4)), deadline_s=PATIENCE_S) == 0


def test_too_many_bytes_to_make_durable_are_refused_at_once(stack: StackTier) -> None:
    with stack.durable_room(12 * BLOCK):
        with pytest.raises(CapacityError), stack.durable_room(8 * BLOCK):
            pass
        with stack.durable_room(4 * BLOCK):
            pass
    with stack.durable_room(16 * BLOCK):
        pass


def test_watermarks_make_room_in_the_background_with_hysteresis(tmp_path: Path) -> None:
    limits = replace(LIMITS, high_bytes=6 * BLOCK, low_bytes=3 * BLOCK)
    with open_stack(tmp_path, limits) as stack:
        put(stack, range(6))
        flushed(stack)
        assert stack.stats().ready == 6  # at the high watermark, not above
        put(stack, range(6, 7))
        flushed(stack)
        assert stack.stats().ready == 3
        put(stack, range(7, 10))
        flushed(stack)
        assert stack.stats().ready == 6
        assert stack.match(keys(*range(10))) == 10  # demoted, not lost


def test_nothing_is_evicted_in_the_background_before_it_is_below(tmp_path: Path) -> None:
    limits = replace(LIMITS, high_bytes=2 * BLOCK, low_bytes=BLOCK)
    with open_stack(tmp_path, limits) as stack:
        disk(stack).failing.set()
        put_run(stack, 6)
        until(lambda: stack.counts().flush.failed >= 2 * 4)  # two tries of a batch of four
        assert stack.stats().ready == 6
        disk(stack).failing.clear()
        flushed(stack)
        assert stack.stats().ready == 1
        assert stack.match(keys(*range(6))) == 6


def test_the_budget_spreads_the_writes(tmp_path: Path) -> None:
    """Ten batches at a tenth of a second each cannot be done in less than nine of those pauses."""
    limits = replace(LIMITS, batch_bytes=BLOCK, bytes_s=10 * BLOCK)
    with open_stack(tmp_path, limits) as stack:
        began = time.monotonic()
        put(stack, range(5))
        flushed(stack)
        assert time.monotonic() - began >= 4 * 0.1


def test_a_dropped_block_leaves_both_tiers(stack: StackTier) -> None:
    put(stack, range(2))
    flushed(stack)
    assert stack.drop(key(1), "invalid")
    assert stack.match(keys(0, 1)) == 1
    assert not stack.drop(key(1), "invalid")


def test_an_ssd_that_is_full_keeps_the_newest(tmp_path: Path) -> None:
    with open_stack(tmp_path, ssd_slots=4) as stack:
        for number in range(12):
            write(stack, key(number), payload(SMALL_LAYOUT, 1, number))
            flushed(stack)
        assert [stack.slow.match(key(number)) for number in (0, 11)] == [0, 1]
        assert stack.slow.stats().ready == 4


def test_a_new_stack_on_the_folder_serves_what_was_flushed(tmp_path: Path) -> None:
    with open_stack(tmp_path) as stack:
        put_down(stack, 10)
    with open_stack(tmp_path) as stack:
        assert stack.match(keys(*range(10))) == 10
        assert stack.promote(keys(*range(SLOTS)), wait_s=PATIENCE_S) == SLOTS
        assert_served(stack, range(SLOTS))


def test_the_counts_of_both_tiers_can_be_had(stack: StackTier) -> None:
    put(stack, range(3))
    flushed(stack)
    assert [(name, stats.ready) for name, stats in stats_of(stack)] == [("dram", 3), ("ssd", 3)]


def test_close_ends_a_hanging_flush_and_later_calls_say_closed(tmp_path: Path) -> None:
    stack = open_stack(tmp_path)
    disk(stack).open_gate.clear()
    put(stack, range(3))
    until(lambda: disk(stack).waiting == 1)
    stack.close()
    stack.close()
    with pytest.raises(ClosedError):
        stack.match(b"")
    with pytest.raises(ClosedError):
        stack.promote(key(0), wait_s=1.0)
    disk(stack).open_gate.set()


def test_threads_that_store_promote_and_evict_see_only_right_bytes(stack: StackTier) -> None:
    """Chains of three blocks, many more than DRAM has room for, by four threads."""
    wrong: list[str] = []

    def work(thread: int) -> None:
        generator = np.random.default_rng(thread)
        for _ in range(60):
            first = 3 * int(generator.integers(0, 12))
            names = [BlockHash(key(first + at)) for at in range(3)]
            run = b"".join(names)
            found = stack.promote(run, wait_s=PATIENCE_S)
            slots = stack.pin(run)
            if slots:
                want = np.concatenate(
                    [payload(SMALL_LAYOUT, 1, first + at) for at in range(len(slots))]
                )
                if not np.array_equal(read(stack, slots), want):
                    wrong.append(f"chain {first}, {found} promoted")
            count = len(slots)
            stack.unpin(slots)
            for at in range(count, 3):
                try:
                    blocks = payload(SMALL_LAYOUT, 1, first + at)
                    write(stack, names[at], blocks, names[at - 1] if at else None)
                except CapacityError:
                    break
            if generator.random() < 0.2:
                stack.fast.evict(2)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * PATIENCE_S)
        assert not thread.is_alive()
    flushed(stack)
    assert not wrong
    stats = stack.stats()
    assert (stats.reserved, stats.quarantined, stats.pins) == (0, 0, 0)
    assert stack.slow.stats().pins == 0


def test_the_flusher_rests_for_its_budget_and_for_others() -> None:
    assert rest_s(0.5, 10, 0, loaded=False) == 0
    assert rest_s(0.5, 10, 10, loaded=False) == 0.5
    assert rest_s(0.5, 10, 1000, loaded=False) == 0
    assert rest_s(0.5, 10, 0, loaded=True) >= 2 * 0.5  # it has a third of the time at most
    assert rest_s(0.5, 10, 1, loaded=True) == 9.5


def test_tokens_go_down_and_come_up_with_their_blocks(stack: StackTier) -> None:
    tokens = np.arange(2 * SMALL_LAYOUT.block_tokens, dtype=np.uint32).reshape(2, -1)
    for number in range(2):
        slot = stack.reserve()
        if number == 0:  # the other one is stored by its hash alone
            stack.note_tokens([slot], tokens[:1])
        block = payload(SMALL_LAYOUT, 1, number)
        crcs = copy_blocks(stack.view([slot], writable=True), view_of(SMALL_LAYOUT, block))
        stack.commit(slot, key(number), key(0) if number else None, crcs[0])
    flushed(stack)
    assert stack.evict(2) == 2
    assert stack.promote(keys(0, 1), wait_s=PATIENCE_S) == 2
    slots = stack.pin(keys(0, 1))
    assert stack.same_tokens(slots, tokens) == 2
    assert stack.same_tokens(slots[1:], 5 + tokens[1:]) == 1
    assert stack.same_tokens(slots, 5 + tokens) == 0
    assert stack.stats().mismatches == 1
    stack.unpin(slots)
