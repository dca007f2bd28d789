"""The owner's side of reads over UCX: what a peer asks for is put into its inbox, then told.

Owns the asks that wait for room, and the grants on slots whose bytes are on their way: a slot that
is released meanwhile stays as it is until its put has ended. Everything here runs on the engine's
thread. Who calls it: the UCX endpoint.
"""

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool._native import ffi, lib
from kvpool.arena import Arena, Slot
from kvpool.block import SlotIndex
from kvpool.errors import (
    CapacityError,
    ClosedError,
    CorruptionError,
    KVPoolError,
    PeerUnreachableError,
    UsageError,
)
from kvpool.memory import BlockView, Crcs
from kvpool.transfer.ucx_connection import UcxConnection
from kvpool.transfer.ucx_wire import ASKS_MAX, Answer, Ask, encode

logger = logging.getLogger(__name__)

# A put that has not ended after this long closes the connection: the reader does not read.
PUT_TIMEOUT_S: Final = 15.0
# When an ask that found no room is tried again.
_RETRY_S: Final = 0.001


class Answers:
    """Answers the asks of one peer. On the engine's thread only.

    Args:
        connection: To the peer.
        region: Returns the arena of a region and a view that keeps its memory; None: there is none.
        call_later: Of the engine.
    """

    def __init__(
        self,
        connection: UcxConnection,
        region: Callable[[int], tuple[Arena, BlockView] | None],
        call_later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self._connection = connection
        self._region = region
        self._call_later = call_later
        self._waiting: deque[Ask] = deque()
        self._putting = 0

    def take(self, ask: Ask) -> None:
        """Answer an ask, now or as soon as there is room.

        Raises:
            CorruptionError: The peer asks for what it cannot: cut it off.
        """
        self._require_sound(ask)
        if len(self._waiting) + self._putting >= ASKS_MAX:
            raise CorruptionError(f"the peer has more than {ASKS_MAX} unanswered asks")
        self._waiting.append(ask)
        if len(self._waiting) == 1:
            self._go_on()

    def _require_sound(self, ask: Ask) -> None:
        found = self._region(ask.region)
        if found is None:
            raise CorruptionError(f"the peer asks for region {ask.region}: there is none")
        layout, slot_count = found[0].layout, found[0].slot_count
        size = len(ask.slots) * (ask.size + 4 * max(1, ask.crc_count))
        if (
            ask.offset + ask.size > layout.block_bytes
            or ask.first_crc + ask.crc_count > layout.crc_count
            or max(ask.slots) >= slot_count
            or ask.at + size > self._connection.peer_inbox_bytes
        ):
            raise CorruptionError("the peer asks for bytes that are not there, or beyond its inbox")

    def _go_on(self) -> None:
        while self._waiting:
            if not self._begin(self._waiting[0]):
                self._call_later(_RETRY_S, self._go_on)
                return
            self._waiting.popleft()

    def _begin(self, ask: Ask) -> bool:
        """Put the bytes of an ask on their way. False if there is no room for them now."""
        found = self._region(ask.region)
        assert found is not None  # regions only ever grow
        arena, memory = found
        held, crcs = _hold(arena, ask)
        table = np.empty((0, 3), dtype=np.uint64)
        if held:
            table, crcs = _table(memory, ask, len(held), crcs)
        note = encode(Answer(ask.number, len(held)))
        try:
            done = self._connection.put(table, PUT_TIMEOUT_S, note, (memory, crcs))
        except CapacityError:
            _settle(arena, held)
            return False
        except (PeerUnreachableError, ClosedError):
            _settle(arena, held)
            return True
        self._putting += 1
        done.add_done_callback(partial(self._ended, arena, held))
        return True

    def _ended(self, arena: Arena, held: list[Slot]) -> None:
        """Let the slots go: their bytes are at the peer, or the connection reads them no more."""
        self._putting -= 1
        _settle(arena, held)


def _hold(arena: Arena, ask: Ask) -> tuple[list[Slot], Crcs]:
    """Grant the leading slots that are ready in the lives asked for; return them and their CRCs."""
    held: list[Slot] = []
    rows: list[Crcs] = []
    for index, generation in zip(ask.slots, ask.generations, strict=True):
        slot = Slot(SlotIndex(index), generation)
        try:
            arena.grant(slot)
        except (UsageError, ClosedError):
            break
        try:
            rows.append(arena.crcs([slot]).reshape(-1))
        except (UsageError, ClosedError):  # not published
            _settle(arena, [slot])
            break
        held.append(slot)
    if not held:
        return held, np.empty(0, dtype=np.uint32)
    last = ask.first_crc + ask.crc_count
    return held, np.ascontiguousarray(np.stack(rows)[:, ask.first_crc : last]).reshape(-1)


def _settle(arena: Arena, held: list[Slot]) -> None:
    for slot in held:
        try:
            arena.settle(slot)
        except KVPoolError:
            logger.exception("a slot was not held")


def _table(memory: BlockView, ask: Ask, count: int, crcs: Crcs) -> tuple[NDArray[np.uint64], Crcs]:
    """Return what is put where, neighbours as one span, and the checksums that are part of it."""
    slots = np.asarray(ask.slots[:count], dtype=np.uint64)
    begins = slots * np.uint64(memory.block_stride) + np.uint64(memory.base + ask.offset)
    if ask.crc_count == 0:
        crcs = np.array([_crc(int(begin), ask.size) for begin in begins], dtype=np.uint32)
    # A run goes on where a slot's bytes end at the next one's begin.
    first = np.flatnonzero(np.diff(begins, prepend=begins[0] + np.uint64(1)) != ask.size)
    sizes = np.diff(np.append(first, count)) * ask.size
    rows = np.empty((len(first) + 1, 3), dtype=np.uint64)
    rows[:-1, 0], rows[:-1, 1], rows[:-1, 2] = begins[first], sizes, ask.at + first * ask.size
    rows[-1] = crcs.ctypes.data, crcs.nbytes, ask.at + len(ask.slots) * ask.size
    return rows, crcs


def _crc(address: int, size: int) -> int:
    return lib.kvp_crc32c(0, ffi.cast("uint8_t *", address), size)
