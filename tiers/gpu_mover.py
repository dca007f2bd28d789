"""Promotion and demotion between a gpu tier and the tiers in host memory below it.

Owns a ring of staging buffers (pinned where the device is a card), a stream of its own, and the order
of copies on it. Many blocks move as one gather or scatter, which is also the conversion between the
attention's order and the canonical one; while the device fills one buffer the host empties the other,
verifying every byte. Decides nothing: who moves what is its caller's. Who calls it: whoever runs a model
on a device and keeps blocks below it.
"""

import threading
import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import numpy as np
import torch

from kvpool.arena import Slots
from kvpool.block import HASH_BYTES, BlockHash, BlockLayout
from kvpool.completion import Deadline
from kvpool.errors import CorruptionError, TransferTimeoutError, UsageError
from kvpool.memory import BlockView, Crcs, Crew, copy_blocks
from kvpool.tiers.base import Tier
from kvpool.tiers.gpu import GpuTier
from kvpool.tiers.slots import SlotTier
from kvpool.tiers.stack import StackTier
from kvpool.tiers.tokens import TokenRows

# Buffers of the ring: one that the device has, one that the host has.
_BUFFERS: Final = 2
# How long a thread sleeps between two looks at a device that is not done yet.
_LOOK_S: Final = 50e-6


class GpuMover:
    """Moves blocks of one gpu tier. Safe from any thread; one move at a time, the others wait for it.

    ``_turn`` is held for the length of one move, which its deadline bounds. Blocks are in the tier's
    order on the device and in canonical order below; what was moved is found, with its checksums and
    tokens, in the tier that it was moved to, and stays in the one that it came from.

    Args:
        tier: Of the device. Blocks are read after, and written before, what its device does next on
            ``compute``.
        ring_blocks: Blocks that the staging buffers hold together, at least 2.
        compute: The stream that the model runs on; None means the current one of this thread.
        crew: Threads that share the host's part of a copy; None means the caller alone.

    Raises:
        UsageError: The ring is too small.
    """

    def __init__(
        self,
        tier: GpuTier,
        *,
        ring_blocks: int = 32,
        compute: "torch.cuda.Stream | None" = None,
        crew: Crew | None = None,
    ) -> None:
        if ring_blocks < _BUFFERS:
            raise UsageError(f"a ring of {ring_blocks} blocks: it needs at least {_BUFFERS}")
        self.tier = tier
        self._crew = crew
        self._device = tier.arena.device
        self._turn = threading.Lock()
        self._compute: torch.cuda.Stream | None = None
        self._copies: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._compute = compute or torch.cuda.current_stream(self._device)
            self._copies = torch.cuda.Stream(self._device)
            # The arena was zeroed on this thread's stream, which may be another than the model's.
            self._copies.wait_stream(torch.cuda.current_stream(self._device))
        self._batch = ring_blocks // _BUFFERS
        self._ring = [_Staging(tier, self._batch) for _ in range(_BUFFERS)]

    def demote(
        self, keys: bytes, parent: BlockHash | None, below: Tier, *, deadline_s: float
    ) -> int:
        """Copy leading blocks of the device to a tier below it; how many are there then.

        Args:
            keys: Of a run of blocks, 32 bytes each, each the parent of the next.
            parent: Of the first block, or None.
            below: A tier in host memory. It evicts at need; one without room takes fewer.
            deadline_s: For everything, the wait for other moves included.

        A block that is damaged leaves the device's tier, counted, and ends the run.

        Raises:
            TransferTimeoutError: The device was not done by the deadline. No block was moved.
            UsageError: The tiers hold blocks of different layouts.
            ClosedError: A tier is closed.
        """
        self.tier.layout.require_equal(below.layout)
        deadline = Deadline(deadline_s)
        had = below.match(keys)
        rest, parent = _after(keys, parent, had)
        held = self.tier.hold(rest)
        try:
            room = Slots.of(below.reserve_run(len(held)))
            held_part = held[: len(room)]
            good = 0
            try:
                crcs, view = self.tier.crcs(held_part), below.view(room, writable=True)
                with self._moving(deadline):
                    good = self._gather(held_part, view, crcs, deadline)
            finally:
                below.settle_run(room)
                below.abort_run(room[good:])
            with _kept(below, room[:good]):
                if good < len(held_part):
                    self.tier.drop(BlockHash(rest[good * HASH_BYTES :][:HASH_BYTES]), "corrupt")
                rows = self.tier.tokens(held_part[:good])
                _commit(below, room[:good], rest, parent, crcs[:good], rows)
        finally:
            self.tier.unpin(held)
        return had + good

    def promote(
        self, keys: bytes, parent: BlockHash | None, below: Tier, *, deadline_s: float
    ) -> int:
        """Copy leading blocks of a tier below to the device; how many are there then.

        What is on a disk is brought up first, as far as the time goes. Kernels that ``compute`` is
        given after this has returned see the blocks; nobody waits for the device here, unless the ring
        is full. A block that is damaged leaves the tier below, counted, and ends the run.

        Args, errors: As ``demote``; what was moved by the deadline stays.
        """
        self.tier.layout.require_equal(below.layout)
        deadline = Deadline(deadline_s)
        had = self.tier.match(keys)
        rest, parent = _after(keys, parent, had)
        below.promote(rest, wait_s=max(0.0, deadline.remaining_s()))
        pins = Slots.of(below.pin(rest))
        try:
            room = self.tier.reserve_run(len(pins))
            pinned = pins[: len(room)]
            good, bad = 0, False
            try:
                crcs, view = below.crcs(pinned), below.view(pinned, writable=False)
                with self._moving(deadline):
                    good, bad = self._scatter(view, room, crcs, deadline)
            finally:
                self.tier.settle_run(room)
                self.tier.abort_run(room[good:])
            with _kept(self.tier, room[:good]):
                if bad:
                    below.drop(BlockHash(rest[good * HASH_BYTES :][:HASH_BYTES]), "corrupt")
                rows = _tokens_of(below, pinned[:good])
                _commit(self.tier, room[:good], rest, parent, crcs[:good], rows)
        finally:
            below.unpin(pins)
        return had + good

    # ---- inside: one move at a time ---------------------------------------------------------------

    def _moving(self, deadline: Deadline) -> "_Turn":
        return _Turn(self._turn, deadline)

    def _gather(self, slots: Slots, dest: BlockView, crcs: Crcs, deadline: Deadline) -> int:
        """Copy slots of the arena out; how many leading ones are what their checksums say."""
        if self._copies is not None and self._compute is not None:
            self._copies.wait_stream(self._compute)  # what computes the blocks is there
        runs = list(self._runs(len(slots)))
        for number, run in enumerate([*runs, None]):
            if run is not None:
                staging = self._ring[number % _BUFFERS]
                staging.wait(deadline)
                with self._on_copies():
                    ids = self._numbers(slots[run.start : run.stop])
                    blocks = self.tier.arena.index_select(3, ids).permute(3, 0, 2, 1, 4, 5)
                    staging.memory[: len(run)].copy_(blocks, non_blocking=True)
                    staging.record(self._copies)
            if number:
                before = runs[number - 1]
                done = self._ring[(number - 1) % _BUFFERS]
                done.wait(deadline)
                part = dest.take(before.start, before.stop)
                whole = self._copy(part, done.view(len(before)), crcs[before.start : before.stop])
                if whole < len(before):
                    return before.start + whole
        return len(slots)

    def _scatter(
        self, source: BlockView, slots: Slots, crcs: Crcs, deadline: Deadline
    ) -> tuple[int, bool]:
        """Copy blocks into slots of the arena; how many leading ones, and whether the next is bad."""
        if self._copies is not None and self._compute is not None:
            self._copies.wait_stream(self._compute)  # whoever read those slots before has ended
        good, bad = 0, False
        try:
            for number, run in enumerate(self._runs(len(slots))):
                staging = self._ring[number % _BUFFERS]
                if not staging.ready(deadline):
                    break
                part = source.take(run.start, run.stop)
                whole = self._copy(staging.view(len(run)), part, crcs[run.start : run.stop])
                with self._on_copies():
                    blocks = staging.memory[:whole].to(self._device, non_blocking=True)
                    ids = self._numbers(slots[run.start : run.start + whole])
                    self.tier.arena.index_copy_(3, ids, blocks.permute(1, 3, 2, 0, 4, 5))
                    staging.record(self._copies)
                good += whole
                if bad := whole < len(run):
                    break
        finally:
            if self._copies is not None and self._compute is not None:
                self._compute.wait_stream(self._copies)
        return good, bad

    def _copy(self, dest: BlockView, source: BlockView, crcs: Crcs) -> int:
        """Copy blocks on the host; how many leading ones are what their checksums say."""
        try:
            copy_blocks(dest, source, crcs=crcs, crew=self._crew)
        except CorruptionError as error:
            assert isinstance(error.block, int)  # copy_blocks says which
            return error.block
        return len(source)

    def _runs(self, count: int) -> Iterator[range]:
        for begin in range(0, count, self._batch):
            yield range(begin, min(begin + self._batch, count))

    def _numbers(self, slots: Slots) -> torch.Tensor:
        return torch.from_numpy(slots.indices.astype(np.int64)).to(self._device)

    def _on_copies(self) -> AbstractContextManager[object]:
        return nullcontext() if self._copies is None else torch.cuda.stream(self._copies)


class _Turn:
    """The right to move, for which others are waited for until a deadline."""

    def __init__(self, lock: threading.Lock, deadline: Deadline) -> None:
        self._lock = lock
        self._deadline = deadline

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=max(0.0, self._deadline.remaining_s())):
            raise TransferTimeoutError("other blocks were being moved until the deadline")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class _Staging:
    """A buffer of some blocks in canonical order, and what the device has to do with it still."""

    def __init__(self, tier: GpuTier, blocks: int) -> None:
        layout, arena = tier.layout, tier.arena
        self._layout: BlockLayout = layout
        self._busy: torch.cuda.Event | None = None
        shape = (layout.num_layers, layout.kv_heads, 2, layout.block_tokens, layout.k_dim)
        self.memory = torch.empty(
            (blocks, *shape), dtype=arena.dtype, pin_memory=arena.device.type == "cuda"
        )

    def view(self, count: int) -> BlockView:
        """Describe the first ``count`` blocks, for the host."""
        ids = np.arange(count, dtype=np.uint64)
        base, size = self.memory.data_ptr(), self._layout.block_bytes
        return BlockView.canonical(self._layout, base, size, ids, owner=self.memory)

    def record(self, stream: "torch.cuda.Stream | None") -> None:
        """Take note that the device has the buffer until it is done with what ``stream`` was given."""
        if stream is not None:
            self._busy = torch.cuda.Event()
            self._busy.record(stream)

    def ready(self, deadline: Deadline) -> bool:
        """Wait until the device has let go; False if it has not by the deadline."""
        while self._busy is not None and not self._busy.query():
            if deadline.remaining_s() <= 0:
                return False
            time.sleep(_LOOK_S)
        self._busy = None
        return True

    def wait(self, deadline: Deadline) -> None:
        """Wait until the device has let go. Raises TransferTimeoutError at the deadline."""
        if not self.ready(deadline):
            raise TransferTimeoutError("the device was not done by the deadline: give it more time")


def _after(keys: bytes, parent: BlockHash | None, had: int) -> tuple[bytes, BlockHash | None]:
    """Return what follows the blocks that are there already, and its parent."""
    at = had * HASH_BYTES
    return keys[at:], BlockHash(keys[at - HASH_BYTES : at]) if had else parent


@contextmanager
def _kept(tier: Tier, slots: Slots) -> Generator[None, None, None]:
    """Give slots back if they are not committed after all: the other tier may be closed meanwhile."""
    try:
        yield
    except BaseException:
        tier.abort_run(slots)
        raise


def _commit(
    tier: Tier, slots: Slots, keys: bytes, parent: BlockHash | None, crcs: Crcs, rows: TokenRows
) -> None:
    if not slots:
        return
    known = rows.known
    if known.any():
        noted = Slots(slots.indices[known], slots.generations[known])
        tier.note_tokens(noted, rows.values[known])
    tier.commit_run(slots, keys[: len(slots) * HASH_BYTES], parent, crcs)


def _tokens_of(tier: Tier, slots: Slots) -> TokenRows:
    """Return what a tier knows of the tokens of pinned slots."""
    if isinstance(tier, StackTier):
        tier = tier.fast
    if isinstance(tier, SlotTier):
        return tier.tokens(slots)
    return TokenRows.unknown(len(slots), tier.layout.block_tokens)
