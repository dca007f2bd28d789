import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool._native import ffi
from kvpool.arena import Arena, Slot, Slots, Window
from kvpool.block import BlockLayout, SlotIndex, new_incarnation
from kvpool.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    CorruptionError,
    StaleIncarnationError,
    UsageError,
)
from kvpool.memory import Crcs, copy_blocks
from kvpool.testing.blocks import SMALL_LAYOUT, key, payload, view_of

SLOTS = 3
INCARNATION = new_incarnation()


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(SMALL_LAYOUT, SLOTS, INCARNATION)
    yield arena
    arena.close()


def publish(arena: Arena, seed: int) -> tuple[Slot, Crcs]:
    slot = arena.reserve()
    crcs = copy_blocks(arena.view([slot]), view_of(SMALL_LAYOUT, payload(SMALL_LAYOUT, 1, seed)))
    arena.commit(slot, crcs[0], key(seed))
    return slot, crcs


def test_counts_follow_the_life_of_a_slot(arena: Arena) -> None:
    slot = arena.reserve()
    arena.grant(slot)
    arena.commit(slot, np.zeros(SMALL_LAYOUT.crc_count, dtype=np.uint32))
    arena.pin(slot)
    counts = arena.counts()
    assert (counts.free, counts.ready, counts.pins, counts.grants) == (SLOTS - 1, 1, 1, 1)
    with pytest.raises(UsageError):
        arena.release(slot)
    arena.unpin(slot)
    arena.release(slot)
    assert arena.counts().quarantined == 1
    arena.settle(slot)
    assert arena.counts().free == SLOTS


def test_a_full_arena_refuses(arena: Arena) -> None:
    slots = [arena.reserve() for _ in range(SLOTS)]
    assert len({slot.index for slot in slots}) == SLOTS
    with pytest.raises(CapacityError):
        arena.reserve()


def test_another_life_or_slot_is_refused(arena: Arena) -> None:
    old = arena.reserve()
    arena.release(old)
    calls = (arena.pin, arena.unpin, arena.grant, arena.settle, arena.release)
    for slot in (old, Slot(SlotIndex(SLOTS), 1), Slot(old.index, old.generation + 1)):
        for call in calls:
            with pytest.raises(UsageError):
                call(slot)


def test_checksums_must_fit(arena: Arena) -> None:
    slot = arena.reserve()
    with pytest.raises(UsageError, match="checksums"):
        arena.commit(slot, np.zeros(SMALL_LAYOUT.crc_count - 1, dtype=np.uint32))
    assert arena.counts().reserved == 1


def test_a_window_reads_what_was_published(arena: Arena) -> None:
    slot, crcs = publish(arena, seed=1)
    window = Window(arena.fd, INCARNATION)
    slots, generations = [slot.index], [slot.generation]
    assert window.leading(slots, generations) == 1
    found, valid = window.crcs(SMALL_LAYOUT, slots, generations)
    assert valid == 1
    np.testing.assert_array_equal(found, crcs)
    out = np.zeros((1, SMALL_LAYOUT.block_bytes), dtype=np.uint8)
    copy_blocks(view_of(SMALL_LAYOUT, out), window.view(SMALL_LAYOUT, slots), crcs=found)
    np.testing.assert_array_equal(out, payload(SMALL_LAYOUT, 1, seed=1))
    arena.release(slot)
    assert window.leading(slots, generations) == 0


def test_a_window_tells_leading_slots_and_refuses_slots_past_the_end(arena: Arena) -> None:
    (first, _), (second, _) = publish(arena, seed=1), publish(arena, seed=2)
    window = Window(arena.fd, INCARNATION)
    indices = [first.index, second.index]
    assert window.leading(indices, [first.generation, second.generation + 1]) == 1
    for wrong in ([SLOTS], [-1]):
        with pytest.raises(UsageError):
            window.leading(wrong, [1])
    with pytest.raises(UsageError):
        window.leading(indices, [1])


def test_a_window_is_read_only(arena: Arena) -> None:
    slot, _ = publish(arena, seed=1)
    view = Window(arena.fd, INCARNATION).view(SMALL_LAYOUT, [slot.index])
    with pytest.raises(UsageError, match="pulled"):
        copy_blocks(view, view_of(SMALL_LAYOUT, payload(SMALL_LAYOUT, 1, seed=2)))


def test_another_incarnation_or_file_is_refused(arena: Arena) -> None:
    with pytest.raises(StaleIncarnationError):
        Window(arena.fd, new_incarnation())
    with open(os.devnull, "rb") as other, pytest.raises(CorruptionError):
        Window(other.fileno(), INCARNATION)


@pytest.mark.parametrize("slots", [0, -1])
def test_an_arena_of_nothing_is_refused(slots: int) -> None:
    with pytest.raises(UsageError):
        Arena(SMALL_LAYOUT, slots, INCARNATION)


def test_more_memory_than_there_is_is_refused() -> None:
    # More than can be mapped at all: what can be mapped would be touched, page by page.
    layout = BlockLayout(num_layers=1024, kv_heads=128, block_tokens=128, k_dim=128, v_dim=128)
    with pytest.raises(CapacityError) as refused:
        Arena(layout, 1 << 20, INCARNATION)
    assert refused.value.size_bytes == layout.block_bytes << 20


def test_a_closed_arena_says_so_and_takes_things_back(arena: Arena) -> None:
    slot, _ = publish(arena, seed=1)
    arena.pin(slot)
    arena.grant(slot)
    arena.close()
    arena.close()
    arena.unpin(slot)
    arena.settle(slot)
    arena.release(slot)
    for call in (arena.reserve, arena.counts, lambda: arena.view([slot]), lambda: arena.fd):
        with pytest.raises(ClosedError):
            call()


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("kvpool-arena" in line for line in maps)


def test_memory_goes_when_the_last_view_goes() -> None:
    gc.collect()
    before = mappings()
    arena = Arena(SMALL_LAYOUT, SLOTS, INCARNATION)
    slot, _ = publish(arena, seed=3)
    view = arena.view([slot])
    arena.close()
    assert mappings() == before + 1
    out = np.zeros((1, SMALL_LAYOUT.block_bytes), dtype=np.uint8)
    copy_blocks(view_of(SMALL_LAYOUT, out), view)
    np.testing.assert_array_equal(out, payload(SMALL_LAYOUT, 1, seed=3))
    del view
    gc.collect()
    assert mappings() == before


def test_close_in_the_middle_of_calls_harms_nobody() -> None:
    """Threads that call while the arena closes get ClosedError, and never touch freed memory."""
    for _ in range(20):
        arena = Arena(SMALL_LAYOUT, SLOTS, INCARNATION)
        started = threading.Barrier(3)
        ends: list[str] = []

        def work(
            arena: Arena = arena,
            started: threading.Barrier = started,
            ends: list[str] = ends,
        ) -> None:
            started.wait(20)
            try:
                while True:
                    arena.release(arena.reserve())
                    arena.counts()
            except ClosedError:
                ends.append("closed")

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        started.wait(20)
        arena.close()
        for thread in threads:
            thread.join(20)
        assert ends == ["closed", "closed"]


# ---- where the memory lies ------------------------------------------------------------------------


def test_memory_lies_on_the_node_that_is_asked_for() -> None:
    """Or it is a ConfigError, where the kernel has no say in it; and other memory does not."""
    try:
        arena = Arena(SMALL_LAYOUT, 64, new_incarnation(), numa_node=0)
    except ConfigError as refused:
        assert refused.key == "pool.numa_node"
        return
    maps = Path("/proc/self/numa_maps").read_text().splitlines()
    mine = [line for line in maps if "kvpool-arena" in line]
    assert mine and all("N0=" in line for line in mine)
    assert not any(" bind" in line for line in maps)  # this thread's next memory is its own again
    arena.close()


@pytest.mark.parametrize("node", [1000, 1 << 20])
def test_a_node_that_is_not_there_is_refused(node: int) -> None:
    with pytest.raises(ConfigError, match="numa_node"):
        Arena(SMALL_LAYOUT, 4, new_incarnation(), numa_node=node)
    Arena(SMALL_LAYOUT, 4, new_incarnation()).close()


def test_locked_memory_is_locked_or_refused() -> None:
    before = _locked_bytes()
    try:
        arena = Arena(SMALL_LAYOUT, 64, new_incarnation(), locked=True)
    except CapacityError as refused:
        assert "locked" in str(refused)
        return
    assert _locked_bytes() - before >= 64 * SMALL_LAYOUT.block_bytes
    arena.close()
    assert _locked_bytes() == before


def test_more_than_may_be_locked_is_refused(tmp_path: Path) -> None:
    """In a process without the right, since root may lock anything."""
    script = """
import os, resource
from kvpool.arena import Arena
from kvpool.block import new_incarnation
from kvpool.errors import CapacityError
from kvpool.testing.blocks import SMALL_LAYOUT
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
if os.getuid() == 0:
    os.setuid(65534)
try:
    Arena(SMALL_LAYOUT, 64, new_incarnation(), locked=True)
except CapacityError as refused:
    print(refused)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert "may not be locked" in done.stdout, done.stderr


def _locked_bytes() -> int:
    """Return what /proc says of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmLck"))


def test_what_c_sees_of_slots_is_every_one_of_them_in_order() -> None:
    slots = Slots(np.arange(8, dtype=np.uint32), np.arange(100, 108, dtype=np.uint64))[::-3]
    indices, generations = (
        ffi.cast(f"uint{bits}_t *", each)
        for bits, each in zip((32, 64), slots.native(), strict=True)
    )
    assert ffi.unpack(indices, 3) == [7, 4, 1]
    assert ffi.unpack(generations, 3) == [107, 104, 101]
    assert slots.native() is slots.native()
