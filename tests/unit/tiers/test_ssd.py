"""What an SSD tier does beyond the contract: whole blocks in and out, chains that last, what is counted."""

import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpool._native import lib
from kvpool.arena import SlotNumbers, Slots
from kvpool.block import BlockLayout
from kvpool.completion import Deadline
from kvpool.errors import (
    ClosedError,
    ConfigError,
    CorruptionError,
    LayoutMismatchError,
    UnavailableError,
    UsageError,
)
from kvpool.events import BlocksEvicted, ListSink
from kvpool.memory import BlockView, Crcs, copy_blocks
from kvpool.testing.blocks import SMALL_LAYOUT, Payload, key, payload, view_of
from kvpool.tiers.ledger import Ledger
from kvpool.tiers.ssd import SsdTier
from kvpool.tiers.ssd_device import Outcome, SsdDevice
from kvpool.tiers.ssd_files import read_superblock
from kvpool.tiers.ssd_format import slot_bytes
from kvpool.tiers.ssd_fsck import check_store
from kvpool.tiers.ssd_index import SsdIndex
from kvpool.tiers.ssd_stats import SsdCounts
from kvpool.tiers.ssd_writer import SsdWriter
from kvpool.tiers.tokens import TokenRows

SLOTS = 8
WAIT_S = 60.0


def open_tier(folder: Path, slots: int = SLOTS, events: ListSink | None = None) -> SsdTier:
    return SsdTier(
        folder, SMALL_LAYOUT, slots, threads=3, staging_slots=2, timeout_s=WAIT_S, events=events
    )


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[SsdTier]:
    with open_tier(tmp_path) as tier:
        yield tier


def keys_of(*numbers: int) -> bytes:
    return b"".join(key(number) for number in numbers)


def blocks_of(count: int, seed: int = 1) -> Payload:
    return payload(SMALL_LAYOUT, count, seed)


def write(tier: SsdTier, *numbers: int) -> int:
    source = view_of(SMALL_LAYOUT, blocks_of(len(numbers)))
    return tier.write(keys_of(*numbers), None, source, deadline_s=WAIT_S)


def test_nobody_writes_behind_a_close(tmp_path: Path) -> None:
    """Who waited for the disk while it was closed would write what the index then lacks."""
    tier = open_tier(tmp_path)
    assert write(tier, 1) == 1
    device = tier._open()
    tier.close()
    with pytest.raises(ClosedError), tier._writer.turn(device, Deadline(WAIT_S)):
        pass
    del device  # which holds the folder
    with open_tier(tmp_path) as again:
        assert again.recovery.source == "index"
        assert again.match(keys_of(1)) == 1


def test_whoever_looks_takes_no_late_slot_from_who_writes(tmp_path: Path) -> None:
    """What a write left late is known when it has ended: only then can it be taken back."""

    class Kernel:
        """Stands in for the device: lets go of one late slot."""

        asked = 0

        def settled(self) -> Slots:
            self.asked += 1
            return Slots.of([])

    kernel = Kernel()
    index = SsdIndex(tmp_path / "index", SLOTS, None)
    writer = SsdWriter(tmp_path, Ledger(SLOTS), index, SsdCounts(), lambda count: None, SLOTS)
    device = cast(SsdDevice, kernel)
    with writer.turn(device, Deadline(WAIT_S)):
        asked = kernel.asked
        writer.reap(device)
        assert kernel.asked == asked
    writer.reap(device)
    assert kernel.asked == asked + 1
    index.close(WAIT_S)


def test_large_writes_are_right_whichever_way_they_are_copied(tmp_path: Path) -> None:
    """The first goes into the cache, the second past it, and what they took decides on the next."""
    layout = BlockLayout(
        num_layers=4, kv_heads=8, block_tokens=16, k_dim=128, v_dim=128, dtype="bfloat16"
    )
    count = (17 << 20) // layout.block_bytes
    with SsdTier(tmp_path, layout, count, threads=3, staging_slots=1, timeout_s=WAIT_S) as tier:
        for turn in range(3):
            keys = keys_of(*range(turn * count, (turn + 1) * count))
            source = payload(layout, count, turn)
            dest = np.zeros_like(source)
            assert tier.write(keys, None, view_of(layout, source), deadline_s=WAIT_S) == count
            slots = tier.pin(keys)
            assert tier.read(slots, view_of(layout, dest), deadline_s=WAIT_S)[0] == count
            tier.unpin(slots)
            assert np.array_equal(dest, source)


def tear(folder: Path, slot: int) -> None:
    """Have a slot hold a header and half of the payload to it."""
    with (folder / "segment-0000.kvp").open("r+b") as segment:
        segment.seek(slot * slot_bytes(SMALL_LAYOUT) + 4096)  # behind the header
        segment.write(bytes(64))


def intent_count(folder: Path) -> int:
    """Return how many intents were written since the store was opened for the first time."""
    raw = (folder / "intents.kvp").read_bytes()
    pages = [raw[at : at + 4096] for at in (0, 4096)]
    return max(1 + int.from_bytes(page[32:40], "little") for page in pages if page[:8].strip(b"\0"))


def test_writes_at_slots_that_were_named_ahead_need_no_intent(tier: SsdTier) -> None:
    """Free ones, and from the ninth on those of blocks that have to go."""
    tier._writer._ahead = 2
    for number in range(3 * SLOTS):
        assert write(tier, number) == 1
        assert intent_count(tier.folder) == number // 3 + 1


def test_blocks_in_slots_that_were_named_ahead_outlive_a_crash(tmp_path: Path) -> None:
    """All but one that the next write had begun to write over."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    chains = (0, 1), (10, 11, 12, 13), (20, 21)
    with open_tier(first) as tier:
        assert write(tier, 0, 1, 2, 3) == write(tier, 10, 11, 12, 13) == 4
        assert write(tier, 20, 21) == 2
        assert intent_count(first) == 1
        torn = int(tier.pin(keys_of(13)).indices[0])
        shutil.copytree(first, second)  # as a crash leaves it
    shutil.copytree(second, third)
    with open_tier(second) as tier:
        assert (tier.recovery.source, tier.recovery.torn, tier.recovery.blocks) == ("headers", 0, 8)
        assert all(tier.durable(keys_of(*chain)) == len(chain) for chain in chains)
    tear(third, torn)
    with open_tier(third) as tier:
        assert (tier.recovery.torn, tier.recovery.blocks) == (1, 7)
        assert [tier.durable(keys_of(*chain)) for chain in chains] == [2, 3, 2]


def test_a_slot_that_failed_is_erased_before_the_next_part_of_a_write(
    tier: SsdTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The intent of the next part need not name it, and its header may be whole over half a payload."""
    device, calls = tier._open(), list[str]()
    write_slots, erase_slots = device.write, device.erase

    def fail_once(
        slots: Slots,
        keys: bytes,
        parents: bytes,
        source: BlockView,
        crcs: Crcs | None,
        timeout_s: float,
        also: SlotNumbers,
        tokens: TokenRows | None = None,
        *,
        results: NDArray[np.uint8] | None = None,
    ) -> Outcome:
        outcome = write_slots(
            slots, keys, parents, source, crcs, timeout_s, also, tokens, results=results
        )
        calls.append("write")
        if len(calls) == 1:
            outcome.results[1] = lib.KVP_SLOT_FAILED
        return outcome

    def erase(slots: SlotNumbers, timeout_s: float) -> Outcome:
        calls.append("erase")
        return erase_slots(slots, timeout_s)

    monkeypatch.setattr(device, "write", fail_once)
    monkeypatch.setattr(device, "erase", erase)
    tier._writer._step = 2
    assert write(tier, 0, 1, 2, 3) == 4
    assert calls == ["write", "erase", "write", "write"]


def test_what_one_crash_tore_is_not_believed_after_the_next(tmp_path: Path) -> None:
    """The intents that named it are overwritten by then, and its header says nothing wrong."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    with open_tier(first) as tier:
        for number in range(4):
            assert write(tier, number) == 1
        for number in (0, 1):
            assert tier.drop(key(number), "invalid")
        assert tier.flush(WAIT_S)  # room in front of what will be torn
        torn = int(tier.pin(keys_of(3)).indices[0])
        shutil.copytree(first, second)  # as a crash leaves it
    tear(second, torn)
    with open_tier(second) as tier:
        tier._writer._ahead = 0  # or the next intents would name it, too
        assert (tier.recovery.torn, tier.match(keys_of(3))) == (1, 0)
        for number in (10, 11):
            assert write(tier, number) == 1
        shutil.copytree(second, third)
    with open_tier(third) as tier:
        assert tier.recovery.source == "headers"
        assert tier.match(keys_of(3)) == 0
        assert tier.durable(keys_of(3)) == 0
        assert [tier.match(keys_of(number)) for number in (2, 10, 11)] == [1, 1, 1]


def test_a_forked_child_closes_nothing_of_its_parents(tmp_path: Path) -> None:
    """Nor says that the store is in order while the parent writes to it."""
    with open_tier(tmp_path) as tier:
        assert write(tier, 1) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, from 3.12 on
            child = os.fork()
        if child == 0:
            tier.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert not read_superblock(tmp_path).clean
        assert write(tier, 2) == 1
    with open_tier(tmp_path) as again:
        assert again.match(keys_of(1, 2)) == 2


def test_a_folder_can_be_opened_again_while_a_fork_lives(tmp_path: Path) -> None:
    """A fork inherits descriptors, and would hold the lock with them until it ends."""
    tier = open_tier(tmp_path)
    assert write(tier, 1) == 1
    told, tell = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, from 3.12 on
        child = os.fork()
    if child == 0:
        try:
            os.close(tell)
            files = [os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()]
            os.read(told, 1)  # until the parent has done
            os._exit(int(any(name.startswith(f"{tmp_path}/s") for name in files)))
        finally:
            os._exit(2)
    os.close(told)
    try:
        with pytest.raises(UnavailableError, match="another process"):
            open_tier(tmp_path)
        assert write(tier, 2) == 1
        tier.close()
        with open_tier(tmp_path) as again:
            assert again.recovery.source == "index"
            assert again.match(keys_of(1, 2)) == 2
            assert write(again, 3) == 1
    finally:
        os.close(tell)
        assert os.waitpid(child, 0)[1] == 0


def test_blocks_go_in_and_out_of_any_order_in_memory(tier: SsdTier) -> None:
    # Token, then head, then layer: nothing is where it is in canonical order.
    layout, blocks = SMALL_LAYOUT, blocks_of(3)
    paged = np.zeros((3, layout.block_bytes), dtype=np.uint8)
    rows = layout.num_layers * layout.kv_heads * (layout.k_row_bytes + layout.v_row_bytes)

    def scattered(memory: Payload) -> BlockView:
        flat = view_of(layout, memory)
        return BlockView(
            layout=layout,
            base=flat.base,
            block_stride=layout.block_bytes,
            layer_stride=layout.kv_heads * (layout.k_row_bytes + layout.v_row_bytes),
            head_stride=layout.k_row_bytes + layout.v_row_bytes,
            kv_stride=layout.k_row_bytes,
            k_token_stride=rows,
            v_token_stride=rows,
            block_ids=np.array([2, 0, 1], dtype=np.uint64),
            owner=flat.owner,
        )

    crcs = copy_blocks(scattered(paged), view_of(layout, blocks))
    written = tier.write(keys_of(0, 1, 2), None, scattered(paged), crcs=crcs, deadline_s=WAIT_S)
    assert written == 3
    slots = tier.pin(keys_of(0, 1, 2))
    out = np.zeros_like(blocks)
    good, found = tier.read(slots, view_of(layout, out), deadline_s=WAIT_S)
    assert good == 3
    np.testing.assert_array_equal(out, blocks)
    np.testing.assert_array_equal(found, crcs)
    again = np.zeros_like(paged)
    assert tier.read(slots, scattered(again), deadline_s=WAIT_S)[0] == 3
    np.testing.assert_array_equal(again, paged)
    tier.unpin(slots)


def test_a_block_that_is_named_twice_in_a_run_leaves_one_header(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        assert write(tier, 1, 2, 1) == 3
        assert (tier.stats().ready, tier.ssd_stats().stale) == (2, 1)
    report = check_store(tmp_path, mend=False)
    assert (report.blocks, report.clean, report.findings) == (2, True, ())


def test_a_source_that_is_not_what_it_says_is_not_written(tier: SsdTier) -> None:
    blocks = blocks_of(2)
    crcs = copy_blocks(view_of(SMALL_LAYOUT, np.zeros_like(blocks)), view_of(SMALL_LAYOUT, blocks))
    blocks[1, 100] ^= 1
    source = view_of(SMALL_LAYOUT, blocks)
    assert tier.write(keys_of(0, 1), None, source, crcs=crcs, deadline_s=WAIT_S) == 1
    with pytest.raises(CorruptionError):
        tier.write(key(1), key(0), source.take(1, 2), crcs=crcs[1:], deadline_s=WAIT_S)
    assert tier.stats().ready == 1


def test_only_whole_chains_are_durable(tier: SsdTier) -> None:
    source = view_of(SMALL_LAYOUT, blocks_of(1))
    assert tier.write(key(1), key(0), source, deadline_s=WAIT_S) == 1
    assert tier.durable(key(1)) == 0  # its parent lies elsewhere
    assert tier.write(key(0), None, source, deadline_s=WAIT_S) == 1
    assert tier.durable(keys_of(0, 1)) == 2
    assert tier.durable(key(1)) == 1
    tier.drop(key(0), "invalid")
    assert tier.durable(key(1)) == 0


def test_a_chain_longer_than_the_tier_keeps_its_beginning(tier: SsdTier) -> None:
    assert write(tier, *range(SLOTS + 3)) == SLOTS
    assert tier.durable(keys_of(*range(SLOTS + 3))) == SLOTS
    assert tier.stats().evictions == 0


def test_a_full_tier_evicts_whole_chains_from_their_ends(tmp_path: Path) -> None:
    events = ListSink()
    with open_tier(tmp_path, events=events) as tier:
        assert write(tier, 0, 1, 2, 3) == 4
        assert write(tier, 10, 11, 12, 13) == 4
        assert write(tier, 20, 21) == 2
        assert tier.match(keys_of(0, 1, 2, 3)) == 2
        assert tier.stats().evictions == 2
    gone = [event for event in events.events if isinstance(event, BlocksEvicted)]
    assert {(event.tier, event.reason) for event in gone} == {("ssd", "capacity")}
    assert sum(event.blocks for event in gone) == 2


def test_pinned_blocks_leave_less_room(tier: SsdTier) -> None:
    write(tier, 0, 1, 2, 3, 4)
    slots = tier.pin(keys_of(0, 1, 2, 3, 4))
    assert write(tier, 10, 11, 12, 13, 14) == 3
    tier.unpin(slots)
    assert write(tier, 10, 11, 12, 13, 14) == 5


def test_what_is_dropped_and_flushed_does_not_come_back(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    write(tier, 0, 1, 2, 3)
    tier.drop(key(3), "invalid")
    assert tier.evict(1) == 1
    assert tier.ssd_stats().stale == 2
    assert tier.flush(WAIT_S)
    assert tier.ssd_stats().stale == 0
    tier.close()
    (tmp_path / "index" / "data.mdb").unlink()  # so that only the headers can say
    with open_tier(tmp_path) as tier:
        assert tier.recovery.source == "headers"
        assert [tier.match(key(number)) for number in range(4)] == [1, 1, 0, 0]


def test_order_of_use_outlives_the_process_as_order_of_writing(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        for number in range(SLOTS):
            write(tier, number)
    with open_tier(tmp_path) as tier:
        assert tier.recovery.blocks == SLOTS
        assert tier.evict(3) == 3
        assert [tier.match(key(number)) for number in range(SLOTS)] == [0] * 3 + [1] * (SLOTS - 3)


def test_lives_are_numbered_on_from_run_to_run(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        first = tier.reserve()
    with open_tier(tmp_path) as tier:
        assert tier.reserve().generation > first.generation


def test_capacity_is_what_the_folder_takes(tmp_path: Path) -> None:
    slots = SsdTier.slots_in(SMALL_LAYOUT, 1 << 20)
    with open_tier(tmp_path, slots):
        taken = sum(path.stat().st_size for path in tmp_path.glob("segment-*"))
    assert (1 << 20) - slot_bytes(SMALL_LAYOUT) < taken <= 1 << 20
    with pytest.raises(ConfigError, match="room for one block"):
        open_tier(tmp_path / "none", SsdTier.slots_in(SMALL_LAYOUT, 100))


def test_wrong_arguments(tier: SsdTier) -> None:
    source = view_of(SMALL_LAYOUT, blocks_of(2))
    with pytest.raises(UsageError):
        tier.write(key(0), None, source, deadline_s=WAIT_S)
    with pytest.raises(UsageError):
        tier.write(b"short", None, source, deadline_s=WAIT_S)
    crcs = np.zeros((1, 1, 1), dtype=np.uint32)
    with pytest.raises(UsageError):
        tier.write(keys_of(0, 1), None, source, crcs=crcs, deadline_s=WAIT_S)
    write(tier, 0)
    slots = tier.pin(key(0))
    with pytest.raises(UsageError):
        tier.read(slots, source, deadline_s=WAIT_S)
    other = type(SMALL_LAYOUT)(num_layers=1, kv_heads=1, block_tokens=16, k_dim=4, v_dim=4)
    small = np.zeros((1, other.block_bytes), dtype=np.uint8)
    with pytest.raises(LayoutMismatchError):
        tier.read(slots, view_of(other, small), deadline_s=WAIT_S)
    tier.unpin(slots)
    with pytest.raises(UsageError, match="not pinned"):
        tier.read(slots, source.take(0, 1), deadline_s=WAIT_S)
    with pytest.raises(UsageError, match="reason"):
        tier.drop(key(0), "boredom")
    assert tier.write(b"", None, source.take(0, 0), deadline_s=WAIT_S) == 0
    for parent in (key(7), key(6)):  # of the first, or of the one behind it
        with pytest.raises(UsageError, match="its own parent"):
            tier.write(key(7) + key(7), parent, source, deadline_s=WAIT_S)
    assert tier.durable(key(7)) == 0
    rows = TokenRows.unknown(2, SMALL_LAYOUT.block_tokens)
    with pytest.raises(UsageError, match="of type uint16"):
        TokenRows(rows.values.astype(np.uint16), rows.known)


def test_a_closed_tier_says_so(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    source = view_of(SMALL_LAYOUT, blocks_of(1))
    tier.close()
    with pytest.raises(ClosedError):
        tier.write(key(0), None, source, deadline_s=WAIT_S)
    with pytest.raises(ClosedError):
        tier.durable(key(0))
    with pytest.raises(ClosedError):
        tier.flush(WAIT_S)
    with pytest.raises(ClosedError):
        tier.ssd_stats()
