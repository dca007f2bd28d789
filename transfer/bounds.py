"""Whether what a caller names can be: whole numbers, inside their bounds, no byte written twice.

Owns the checks of numbers that C walks without looking: addresses, strides, slots, spans. All run
before anything moves and raise UsageError, so that a wrong argument ends its own call and nothing
else. Whether an address is mapped is not checked: the system would have to be asked for each span.
What a view or a span is said to lie in (its ``owner``) is checked where the owner says its size.
Who calls it: the reads and writes of every transport, and puts.
"""

import math
import operator
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, SupportsIndex, cast

import numpy as np
from numpy.typing import NDArray

from kvpool.block import BlockLayout
from kvpool.errors import UsageError
from kvpool.memory import BlockIds, BlockView, Held
from kvpool.transfer.base import SPANS_MAX, SlotSpan
from kvpool.transfer.write_wire import ROW, Rows

Numbers = NDArray[np.uint64]

ADDRESS_END: Final = 2**64
# 30 years: seconds beyond it do not fit the nanoseconds that C counts in.
DEADLINE_S_END: Final = 1e9


def numbers(values: Sequence[int], what: str) -> Numbers:
    """Return whole numbers as uint64. Raises UsageError: one is negative, too large or a fraction."""
    try:
        # A third of the time that numpy takes for a list, and it takes no fraction for a number.
        return np.frombuffer(array("Q", values), dtype=np.uint64)
    except (TypeError, OverflowError) as error:
        raise UsageError(f"{what}: each is a whole number from 0 to 2**64 - 1") from error


def is_index(value: object, count: int) -> bool:
    """Say whether ``value`` is a whole number below ``count``."""
    try:
        return 0 <= operator.index(cast(SupportsIndex, value)) < count
    except TypeError:
        return False


def require_deadline(deadline_s: float) -> None:
    """Raise UsageError unless a read can wait so long; a passed deadline is one, too."""
    if not math.isfinite(deadline_s) or deadline_s >= DEADLINE_S_END:
        raise UsageError(f"a deadline of {deadline_s} s: every read needs one below 1e9 s")


def require_apart(begins: Numbers, sizes: Numbers, what: str) -> None:
    """Raise UsageError if a byte of [begin, begin + size) is named twice, or one ends past 2**64."""
    ends = begins + sizes
    if bool((ends < begins).any()):
        raise UsageError(f"{what}: one passes the end of the address space")
    if bool((ends[:-1] <= begins[1:]).all()):
        return  # ascending, as most are
    order = np.argsort(begins, kind="stable")
    if bool((ends[order][:-1] > begins[order][1:]).any()):
        raise UsageError(f"{what}: two overlap, and the bytes of one would be lost")


def require_puts(table: Numbers, room: int) -> None:
    """Raise UsageError unless spans can be put into a peer's inbox.

    Args:
        table: uint64 [n, 3]: local address, size, offset in the inbox.
        room: Bytes of the inbox.
    """
    if len(table) > SPANS_MAX:
        raise UsageError(f"a batch of {len(table)} spans: at most {SPANS_MAX}")
    if len(table) == 1:  # the most usual one, and numpy would take longer than the put
        begin, length, to = table[0].tolist()
        if 0 < begin < begin + length < ADDRESS_END and to + length <= room:
            return
    local, size, offset = table[:, 0], table[:, 1], table[:, 2]
    wrong = (size == 0) | (local == 0) | (size > room) | (offset > np.uint64(room) - size)
    if bool(wrong.any()):
        at = int(np.argmax(wrong))
        raise UsageError(
            f"span {at} of the batch, {size[at]} bytes to {offset[at]}, is empty or leaves the"
            f" peer's inbox of {room} bytes"
        )
    if bool((local > np.uint64(ADDRESS_END - 1) - size).any()):
        raise UsageError("a span of the batch passes the end of the address space")
    require_apart(offset, size, "spans in the peer's inbox")


def require_writes(
    pairs: Sequence[tuple[SlotSpan, SlotSpan]],
    ours: Sequence[tuple[int, int]],
    theirs: Sequence[tuple[int, int]],
) -> Rows:
    """Return spans to write as rows; raise UsageError unless they can be written so.

    Args:
        pairs: As for ``Endpoint.write_spans``.
        ours: Slot count and slot bytes of each region that is registered here.
        theirs: The same of each that the peer has told of.
    """
    if not 0 < len(pairs) <= SPANS_MAX:
        raise UsageError(f"a batch of {len(pairs)} spans: 1 to {SPANS_MAX}")
    flat: list[int] = []
    for here, there in pairs:
        flat += (here.region, here.slot, here.generation, here.offset)
        flat += (there.region, there.slot, there.generation, there.offset, there.size, here.size)
    what = "regions, slots, generations, offsets and sizes of spans"
    table = numbers(flat, what).reshape(-1, 10)
    if bool((table[:, 8] != table[:, 9]).any()):
        raise UsageError("a span is written to one of another size")
    _require_in_slots(table[:, [0, 1, 3, 8]], ours, "of this process (register its memory)")
    _require_in_slots(table[:, [4, 5, 7, 8]], theirs, "that the peer has told of (wait_region)")
    # By region, slot and offset: what overlaps lies side by side.
    dest = table[np.lexsort((table[:, 7], table[:, 5], table[:, 4]))]
    same_slot = (dest[:-1, 4:6] == dest[1:, 4:6]).all(axis=1)
    if bool((same_slot & (dest[:-1, 7] + dest[:-1, 8] > dest[1:, 7])).any()):
        raise UsageError(
            "destinations of the batch: two overlap, and the bytes of one would be lost"
        )
    rows = np.empty(len(table), dtype=ROW)
    for name, column in zip(ROW.names or (), table.T, strict=False):
        rows[name] = column
    return rows


def _require_in_slots(table: Numbers, regions: Sequence[tuple[int, int]], whose: str) -> None:
    """Raise UsageError unless each row (region, slot, offset, size) is inside a slot of ``regions``."""
    region, slot, offset, size = table.T
    unknown = region >= len(regions)
    if bool(unknown.any()):
        raise UsageError(f"region {region[int(unknown.argmax())]} is no region {whose}")
    slot_count, slot_bytes = np.array(regions, dtype=np.uint64)[region].T
    wrong = (slot >= slot_count) | (size == 0) | (size > slot_bytes) | (offset > slot_bytes - size)
    if bool(wrong.any()):
        at = int(wrong.argmax())
        raise UsageError(
            f"span {at}, {size[at]} bytes at {offset[at]} of slot {slot[at]}, is empty or leaves the"
            f" slot's {slot_bytes[at]} bytes or the region's {slot_count[at]} slots"
        )


def require_room(view: BlockView) -> None:
    """Raise UsageError unless a copy into ``view`` writes each byte once, inside what holds it.

    Strides have to nest: sorted, each is at least what lies below it. Rows that interleave in any
    other way are refused, whether or not they overlap: no cache is laid out so.
    """
    first, last = _first_and_last(view.block_ids)
    strides = (
        *(view.block_stride, view.layer_stride, view.head_stride, view.kv_stride),
        *(view.k_token_stride, view.v_token_stride),
    )
    extent = _room(view.layout, last - first + 1, *strides)
    if not view.base or not is_index(view.base, ADDRESS_END):
        raise UsageError(f"the destination is at {view.base}, which is no address")
    begin = view.base + first * view.block_stride
    if begin + max(extent, view.kv_stride) >= ADDRESS_END:
        raise UsageError("the destination passes the end of the address space: wrong block ids?")
    held = view.owner
    if isinstance(held, Held) and not held.address <= begin <= begin + extent <= held.end:
        raise UsageError(
            f"blocks {first} to {last} of the destination leave the {held.size} bytes that hold it"
        )


def _first_and_last(block_ids: BlockIds) -> tuple[int, int]:
    """Return the least and the largest id. Raises UsageError: one comes twice."""
    if not bool((block_ids[1:] > block_ids[:-1]).all()):  # ascending is the usual case
        block_ids = np.sort(block_ids)
        if bool((block_ids[1:] == block_ids[:-1]).any()):
            raise UsageError("a block of the destination is named twice")
    return int(block_ids[0]), int(block_ids[-1])


# The same few caches are read into for hours, and this is 15 us each time. Typed: 1.0 is no stride.
@lru_cache(maxsize=256, typed=True)
def _room(layout: BlockLayout, blocks: int, *strides: int) -> int:
    """Return the bytes that ``blocks`` in a row take. Raises UsageError: strides do not nest."""
    numbers(strides, "the destination's strides")
    block, layer, head, kv, k_token, v_token = strides
    outer = [(block, blocks), (layer, layout.num_layers), (head, layout.kv_heads)]
    rows = [(k_token, layout.k_row_bytes)]
    if layout.v_row_bytes:
        rows.append((v_token, layout.v_row_bytes))
    return _extent(outer, rows, layout.block_tokens, kv)


def _extent(
    outer: list[tuple[int, int]], rows: list[tuple[int, int]], tokens: int, kv_stride: int
) -> int:
    """Return the bytes from the first to the last one. Raises UsageError: strides do not nest.

    Args:
        outer: Stride and count of blocks, layers and heads.
        rows: Stride of tokens and size of a row, of K and of V if there is one.
        tokens: Of a block.
        kv_stride: From K to V.
    """
    alike = len({stride for stride, _ in rows}) == 1
    sizes = [size for _, size in rows]
    if alike:
        outer = [*outer, (rows[0][0], tokens)]
    else:
        sizes = [_over(size, stride, tokens) for stride, size in rows]
    dims = sorted(dim for dim in outer if dim[1] > 1)
    for at in range(len(dims) + 1):
        if len(sizes) == 2 and (at == len(dims) or kv_stride < dims[at][0]):
            if kv_stride < sizes[0]:
                raise UsageError("K and V of the destination overlap")
            sizes = [kv_stride + sizes[1]]
        if at < len(dims):
            sizes = [_over(size, *dims[at]) for size in sizes]
    return sizes[0]


def _over(size: int, stride: int, count: int) -> int:
    """Return the extent of ``count`` things of ``size`` bytes that lie ``stride`` apart."""
    if count > 1 and stride < size:
        raise UsageError(
            f"rows of the destination overlap: a stride of {stride} bytes over {size} bytes"
        )
    return (count - 1) * stride + size
