"""Where bytes lie: regions, spans and views of blocks. The only types that tiers and transfer share.

Owns addresses, never memory: each object keeps the owner of its memory alive. Who calls it: every
wing; the C core is handed what these describe.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvpool._native import ffi, lib
from kvpool.block import BlockLayout
from kvpool.errors import CapacityError, CorruptionError, InternalError, UsageError

if TYPE_CHECKING:
    from kvpool._native import CData

# Block ids of a view, and slots, as the C core takes them.
BlockIds = NDArray[np.uint64]
Crcs = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Held:
    """A buffer that is kept alive and in its place: the owner of spans and views that lie in it.

    Attributes:
        buffer, export: The object, and cffi's hold on it.
        address, size: Where its bytes are.
    """

    buffer: object
    export: object
    address: int
    size: int

    @property
    def end(self) -> int:
        """Address behind the last byte."""
        return self.address + self.size


@dataclass(frozen=True, slots=True)
class Span:
    """``size`` bytes at ``address`` in this process.

    Attributes:
        owner: Whatever must stay alive while the span is used.
    """

    address: int
    size: int
    owner: object = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, buffer: "bytearray | memoryview | NDArray[np.generic]") -> "Span":
        """Describe a writable, contiguous buffer."""
        if isinstance(buffer, memoryview):
            # CPython 3.11 crashes when its collector meets a memoryview that cffi holds an export
            # of; an array between the two is not collected.
            buffer = np.frombuffer(buffer, dtype=np.uint8)
        view = ffi.from_buffer("uint8_t[]", buffer, require_writable=True)
        address, size = int(ffi.cast("uintptr_t", view)), len(view)
        return cls(address, size, Held(buffer, view, address, size))

    def view(self) -> memoryview:
        """Return the bytes as a writable memoryview."""
        return memoryview(ffi.buffer(ffi.cast("uint8_t *", self.address), self.size))

    def part(self, offset: int, size: int) -> "Span":
        """Return a span inside this one. Raises UsageError past the end."""
        if not 0 <= offset <= offset + size <= self.size:
            raise UsageError(f"span of {size} bytes at {offset} passes the end at {self.size}")
        return Span(self.address + offset, size, self.owner)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockView:
    """Blocks at regular strides: a paged cache, tensors per layer, or slots of an arena.

    Row t of K (kv 0) or V (kv 1) of head h of layer l of block id b lies at ``base + b *
    block_stride + l * layer_stride + h * head_stride + kv * kv_stride + t * token_stride``.

    Attributes:
        layout: Shape of the blocks; its order says nothing of the order here.
        base: Address of block id 0.
        block_stride, layer_stride, head_stride, kv_stride: Bytes.
        k_token_stride, v_token_stride: Bytes from one token's row to the next.
        block_ids: uint64 array [blocks]: which ids, in the order of the chain.
        owner: Whatever must stay alive while the view is used.
        writable: False for a peer's memory; a copy into it is refused.
    """

    layout: BlockLayout
    base: int
    block_stride: int
    layer_stride: int
    head_stride: int
    kv_stride: int
    k_token_stride: int
    v_token_stride: int
    block_ids: BlockIds
    owner: object = field(default=None, repr=False, compare=False)
    writable: bool = True

    def __post_init__(self) -> None:
        ids = self.block_ids
        if ids.dtype != np.uint64 or ids.ndim != 1 or not ids.flags.c_contiguous:
            # C reads them where they lie, 8 bytes each.
            raise UsageError(
                f"block ids of type {ids.dtype} and shape {ids.shape}: give a contiguous array of "
                "one dimension of numpy.uint64"
            )

    @classmethod
    def canonical(
        cls,
        layout: BlockLayout,
        base: int,
        block_stride: int,
        block_ids: "BlockIds | list[int]",
        owner: object = None,
        writable: bool = True,
    ) -> "BlockView":
        """Describe payloads in canonical order, ``block_stride`` bytes apart."""
        return cls(
            layout=layout,
            base=base,
            block_stride=block_stride,
            layer_stride=layout.layer_bytes,
            head_stride=layout.head_bytes,
            kv_stride=layout.block_tokens * layout.k_row_bytes,
            k_token_stride=layout.k_row_bytes,
            v_token_stride=layout.v_row_bytes,
            block_ids=np.ascontiguousarray(block_ids, dtype=np.uint64),
            owner=owner,
            writable=writable,
        )

    @classmethod
    def of_buffer(cls, layout: BlockLayout, span: Span) -> "BlockView":
        """Describe a flat buffer of whole payloads, one after another."""
        count, rest = divmod(span.size, layout.block_bytes)
        if rest:
            raise UsageError(f"{span.size} bytes are not whole blocks of {layout.block_bytes}")
        ids = np.arange(count, dtype=np.uint64)
        return cls.canonical(layout, span.address, layout.block_bytes, ids, span.owner)

    def __len__(self) -> int:
        return len(self.block_ids)

    def take(self, begin: int, end: int) -> "BlockView":
        """Return the view of blocks ``begin`` to ``end`` (exclusive) of this one."""
        if begin == 0 and end == len(self.block_ids):
            return self
        return self.with_ids(self.block_ids[begin:end])

    def with_ids(
        self,
        block_ids: "BlockIds | list[int]",
        *,
        owner: object = None,
        writable: bool | None = None,
    ) -> "BlockView":
        """Return the same memory with other block ids, and another owner or right where one is given."""
        return BlockView(
            layout=self.layout,
            base=self.base,
            block_stride=self.block_stride,
            layer_stride=self.layer_stride,
            head_stride=self.head_stride,
            kv_stride=self.kv_stride,
            k_token_stride=self.k_token_stride,
            v_token_stride=self.v_token_stride,
            block_ids=np.ascontiguousarray(block_ids, dtype=np.uint64),
            owner=self.owner if owner is None else owner,
            writable=self.writable if writable is None else writable,
        )

    def native(self) -> "CData":
        """Return the ``kvp_view`` that describes this to the C core."""
        return ffi.new(
            "kvp_view *",
            (
                self.base,
                self.block_stride,
                self.layer_stride,
                self.head_stride,
                self.kv_stride,
                self.k_token_stride,
                self.v_token_stride,
            ),
        )


class Crew:
    """Threads that share the work of one copy. Safe from any thread.

    A copy is done by its caller and by the helpers that are idle; nobody waits for a helper that is
    busy with another one. Closed when the last reference is gone, which may not be during a copy.

    Args:
        threads: That copy together, the caller included.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise UsageError(f"a crew of {threads} threads: it needs at least one")
        out = ffi.new("kvp_crew **")
        status = lib.kvp_crew_open(threads - 1, out)
        if status != lib.KVP_OK:
            raise CapacityError(f"{threads - 1} threads cannot be started (errno {ffi.errno})")
        self.threads = threads
        self._crew = ffi.gc(out[0], lib.kvp_crew_close)

    def native(self) -> "CData":
        """Return the ``kvp_crew``."""
        return self._crew


def copy_blocks(
    dest: BlockView,
    source: BlockView,
    *,
    layers: range | None = None,
    crcs: Crcs | None = None,
    crew: Crew | None = None,
) -> Crcs:
    """Copy blocks between two views, computing CRC32C on the way.

    Args:
        dest: Where to. As many blocks as ``source``, of an equal layout.
        source: Where from. The two must not overlap.
        layers: Layers to copy, step 1; None means all.
        crcs: uint32 [blocks, layers, kv_heads], what each (layer, head) must sum to, or None.
        crew: Threads to share the work with; None means this one alone.

    Returns:
        The CRC32C of what was copied, uint32 [blocks, layers, kv_heads]: ``crcs`` if it was given.

    Raises:
        CorruptionError: A checksum differed; ``block`` is the index of the first bad block. Blocks
            before it are whole and verified, it and those after are undefined.
        UsageError, LayoutMismatchError: The views do not fit. Nothing was copied.

    Blocks for the copy, without the GIL. Safe from any thread.
    """
    _require_fit(dest, source)
    layout = source.layout
    span = range(layout.num_layers) if layers is None else layers
    if span.step != 1 or not 0 <= span.start <= span.stop <= layout.num_layers:
        raise UsageError(f"layers {span} are not a run within 0..{layout.num_layers}")
    shape = (len(source), len(span), layout.kv_heads)
    if crcs is not None and crcs.shape != shape:
        raise UsageError(f"checksums of shape {crcs.shape} where {shape} is expected")
    sums, pointer, stride = _described(np.empty(shape, dtype=np.uint32) if crcs is None else crcs)
    bad = ffi.new("size_t *")
    native_shape = ffi.new(
        "kvp_shape *",
        (layout.kv_heads, layout.block_tokens, layout.k_row_bytes, layout.v_row_bytes),
    )
    arguments = (
        native_shape,
        dest.native(),
        ffi.from_buffer("uint64_t[]", dest.block_ids),
        source.native(),
        ffi.from_buffer("uint64_t[]", source.block_ids),
        len(source),
        span.start,
        span.stop,
        ffi.NULL if crcs is None else pointer,
        pointer if crcs is None else ffi.NULL,
        stride,
        bad,
    )
    if crew is None:
        status = lib.kvp_copy_blocks(*arguments)
    else:
        status = lib.kvp_crew_copy_blocks(crew.native(), *arguments)
    if status == lib.KVP_CORRUPT:
        raise CorruptionError(f"block {bad[0]} of {len(source)} has a wrong checksum", block=bad[0])
    if status != lib.KVP_OK:
        raise InternalError(f"kvp_copy_blocks answered {status}")
    return sums


def _require_fit(dest: BlockView, source: BlockView) -> None:
    dest.layout.require_equal(source.layout)
    if len(dest) != len(source):
        raise UsageError(f"{len(source)} blocks do not fit a view of {len(dest)}")
    if not dest.writable:
        raise UsageError(
            "the destination is another process's memory: bytes are pulled, not pushed"
        )


def _described(crcs: Crcs) -> "tuple[Crcs, CData, int]":
    """Return checksums as C takes them, where they lie, and how many lie from one block to the next."""
    flags = crcs.flags
    if crcs.dtype == np.uint32 and flags.c_contiguous and flags.aligned:
        return crcs, ffi.from_buffer("uint32_t[]", crcs), crcs.shape[1] * crcs.shape[2]
    sums = in_runs(crcs)
    # Looking for the address takes 30 us where nothing of it is in the caches.
    pointer = ffi.cast("uint32_t *", sums.__array_interface__["data"][0])
    return sums, pointer, sums.strides[0] // sums.itemsize


def in_runs(crcs: Crcs) -> Crcs:
    """Return checksums whose layers and heads lie one after another in each block, copied if not."""
    block = crcs[:1]
    fits = crcs.dtype == np.uint32 and block.flags.c_contiguous and block.flags.aligned
    if fits and crcs.strides[0] >= block.nbytes:
        return crcs
    return np.ascontiguousarray(crcs, dtype=np.uint32)
