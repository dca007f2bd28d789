"""What an SSD store holds when it is opened: by its index after an orderly close, else by its headers.

Owns which blocks are believed. After a crash every header is read, and the payloads too of the slots
that a write may have been at, which the store's intents name. Who calls it: the SSD tier.
"""

import time
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvpool._native import lib
from kvpool.arena import SlotNumbers, Slots
from kvpool.errors import UnavailableError
from kvpool.tiers.ledger import Ledger, Listing
from kvpool.tiers.ssd_device import INTENT_BYTES, SsdDevice, intent_slots
from kvpool.tiers.ssd_files import SsdFiles, translating
from kvpool.tiers.ssd_format import INTENT_FILE
from kvpool.tiers.ssd_index import SsdIndex

# Slots of one look at headers: 4 MiB of reading, some 20 ms.
_SCAN_SLOTS: Final = 1024
# Slots of one look at payloads.
_WHOLE_SLOTS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What opening a store found.

    Attributes:
        source: Nothing was there; the index was believed; or the headers were read.
        blocks: Believed.
        torn: Slots that a write was at when the store was left, and that it had not made whole.
        damaged: Headers that are no header of this store.
        unreadable: Slots that the disk did not give.
        doubled: Older copies of blocks that lie in two slots.
        seconds: How long it took.
    """

    source: Literal["new", "index", "headers"]
    blocks: int
    torn: int = 0
    damaged: int = 0
    unreadable: int = 0
    doubled: int = 0
    seconds: float = 0.0


def recover(
    files: SsdFiles, device: SsdDevice, ledger: Ledger, index: SsdIndex, timeout_s: float
) -> tuple[Recovery, SlotNumbers]:
    """Fill an empty ledger; also return the torn slots.

    Their headers have to be erased before anything is written: the next intents will not name them,
    and after another crash nobody would look at their payloads. Raises UnavailableError if the disk
    does not answer for ``timeout_s``.
    """
    began = time.monotonic()
    none = np.zeros(0, dtype=np.uint32)
    if files.superblock.opens == 1:
        return Recovery(source="new", blocks=0), none
    if index.found is not None:
        kept = ledger.restore(index.found)
        took_s = time.monotonic() - began
        return Recovery(source="index", blocks=int(kept.sum()), seconds=took_s), none
    with translating("the intents cannot be read", files.folder):
        intents = (files.folder / INTENT_FILE).read_bytes()[:INTENT_BYTES]
    suspects = intent_slots(intents, files.superblock.store_id)
    suspects = suspects[suspects < files.geometry.slot_count]
    found, results = scan(device, files.geometry.slot_count, timeout_s)
    torn = _torn(device, suspects, timeout_s)
    whole = found.take(~np.isin(found.slots.indices, torn))
    newest = newest_copies(whole)
    blocks, doubled = whole.take(newest), whole.slots.indices[~newest]
    kept = ledger.restore(_by_age(blocks))
    damaged = damaged_slots(results)
    ledger.mark(np.concatenate([torn, doubled, damaged]), stale=True)
    index.write_all(blocks)
    recovery = Recovery(
        source="headers",
        blocks=int(kept.sum()),
        torn=len(torn),
        damaged=len(np.setdiff1d(damaged, torn)),
        unreadable=int((results == lib.KVP_SLOT_FAILED).sum()),
        doubled=len(doubled),
        seconds=time.monotonic() - began,
    )
    return recovery, torn


def scan(
    device: SsdDevice, slot_count: int, timeout_s: float, *, whole: bool = False
) -> tuple[Listing, NDArray[np.uint8]]:
    """Look at every slot: the blocks that are there, in order of slots, and each slot's result.

    Raises UnavailableError if the disk does not answer for ``timeout_s``.
    """
    parts: list[Listing] = []
    results: list[NDArray[np.uint8]] = []
    step = _WHOLE_SLOTS if whole else _SCAN_SLOTS
    for begin in range(0, slot_count, step):
        slots = np.arange(begin, min(begin + step, slot_count), dtype=np.uint32)
        outcome, found = device.scan(slots, whole=whole, timeout_s=timeout_s)
        if outcome.timed_out:
            raise UnavailableError(
                f"the disk did not give slots {begin} and on within {timeout_s} s: look at it",
                tier="ssd",
            )
        parts.append(found)
        results.append(outcome.results)
    return _joined(parts), np.concatenate(results)


def damaged_slots(results: NDArray[np.uint8]) -> SlotNumbers:
    """Return the slots whose header is no header of this store."""
    wrong = (lib.KVP_SLOT_CORRUPT, lib.KVP_SLOT_OTHER, lib.KVP_SLOT_VERSION)
    return np.flatnonzero(np.isin(results, wrong)).astype(np.uint32)


def newest_copies(blocks: Listing) -> NDArray[np.bool_]:
    """Say which blocks are the youngest copy of their key."""
    # Bytes of one length: that numpy's text ignores zeros at the end makes no two of them equal.
    names = np.frombuffer(blocks.keys, dtype="S32")
    youngest_first = np.argsort(blocks.slots.generations, kind="stable")[::-1]
    _, first = np.unique(names[youngest_first], return_index=True)
    newest = np.zeros(len(names), dtype=np.bool_)
    newest[youngest_first[first]] = True
    return newest


def _torn(device: SsdDevice, suspects: SlotNumbers, timeout_s: float) -> SlotNumbers:
    """Return those of the slots that hold a header and not the payload to it."""
    torn = [np.zeros(0, dtype=np.uint32)]
    for begin in range(0, len(suspects), _WHOLE_SLOTS):
        slots = suspects[begin : begin + _WHOLE_SLOTS]
        outcome, _ = device.scan(slots, whole=True, timeout_s=timeout_s)
        if outcome.timed_out:  # what was not looked at may be whole
            raise UnavailableError(
                f"the disk did not give slots that a write was at within {timeout_s} s: look at it",
                tier="ssd",
            )
        fine = outcome.are(lib.KVP_SLOT_DONE) | outcome.are(lib.KVP_SLOT_EMPTY)
        torn.append(slots[~fine])
    return np.concatenate(torn)


def _by_age(blocks: Listing) -> Listing:
    order = np.argsort(blocks.slots.generations, kind="stable")
    return blocks.take(order)


def _joined(parts: list[Listing]) -> Listing:
    return Listing(
        Slots(
            np.concatenate([part.slots.indices for part in parts]),
            np.concatenate([part.slots.generations for part in parts]),
        ),
        b"".join(part.keys for part in parts),
        b"".join(part.parents for part in parts),
    )
