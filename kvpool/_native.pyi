"""The C core as Python sees it, through cffi: the headers ``native/include/kvpool_*api.h``.

Those headers say what each function does, who owns what, and which threads may call; a test compares
the names here with those compiled. Functions run without the GIL. An argument that is a pointer is
a CData, or bytes where C only reads; a nullable one may be ``ffi.NULL``, never None. A result
called a status in the header is one of ``lib.KVP_*``.
"""

from collections.abc import Callable
from typing import Final, Literal, Self, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from kvpool._native_tiers import TierLib
from kvpool._native_transfer import TransferLib

# numpy's own types say that an array is a Buffer only from Python 3.12 on.
_Memory: TypeAlias = Buffer | NDArray[np.generic]

class CData:
    """A C value: a pointer, an array or a number. An array keeps its memory alive."""

    def __int__(self) -> int: ...
    def __len__(self) -> int: ...
    def __bool__(self) -> bool: ...
    def __add__(self, offset: int, /) -> Self: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *reason: object) -> None: ...

class IntCData(CData):
    """An array of, or a pointer to, integers."""

    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> IntCData: ...
    @overload
    def __setitem__(self, index: int, value: int, /) -> None: ...
    @overload
    def __setitem__(self, index: slice, value: object, /) -> None: ...

class PointerCData(CData):
    """Room for pointers, which a function fills."""

    def __getitem__(self, index: int, /) -> CData: ...
    def __setitem__(self, index: int, value: CData, /) -> None: ...

class ArenaCounts(CData):
    """A ``kvp_arena_counts *``."""

    free: int
    reserved: int
    ready: int
    quarantined: int
    pins: int
    grants: int

class LedgerCounts(CData):
    """A ``kvp_ledger_counts *``."""

    free: int
    reserved: int
    ready: int
    quarantined: int
    pins: int
    grants: int
    stale: int

class UcxEvent(CData):
    """A ``kvp_ucx_event *``."""

    kind: int
    status: int
    ucx_code: int
    accepted: int
    endpoint: int
    cookie: int
    inbox_offset: int
    peer_inbox_bytes: int
    good: int
    peer: CData
    note_size: int
    note: CData

class CBuffer:
    """The bytes behind a pointer. Does not keep them alive."""

    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: slice, /) -> bytes: ...
    def __setitem__(self, index: slice, value: _Memory, /) -> None: ...

_Pointer = TypeVar("_Pointer", bound=CData)

class FFI:
    """cffi's compiled ``ffi``, as far as kvpool uses it."""

    NULL: Final[CData]
    error: type[Exception]
    errno: int
    """The calling thread's errno after the last C call: read it after KVP_SYSTEM."""

    # These overlap with the last one, which is right for every other text: integers, or a struct
    # that only C looks into.
    @overload
    def new(  # type: ignore[overload-overlap]
        self,
        cdecl: Literal[
            "kvp_arena **",
            "kvp_bell **",
            "kvp_crew **",
            "kvp_window **",
            "kvp_mailbox **",
            "kvp_ucx **",
            "kvp_ledger **",
            "kvp_ssd **",
        ],
        /,
    ) -> PointerCData: ...
    @overload
    def new(self, cdecl: Literal["kvp_arena_counts *"], /) -> ArenaCounts: ...  # type: ignore[overload-overlap]
    @overload
    def new(self, cdecl: Literal["kvp_ledger_counts *"], /) -> LedgerCounts: ...  # type: ignore[overload-overlap]
    @overload
    def new(self, cdecl: Literal["kvp_ucx_event *"], /) -> UcxEvent: ...  # type: ignore[overload-overlap]
    @overload
    def new(self, cdecl: str, init: object = ..., /) -> IntCData: ...
    def cast(self, cdecl: str, value: CData | int, /) -> IntCData: ...
    @overload
    def from_buffer(self, buffer: _Memory, /, *, require_writable: bool = ...) -> IntCData: ...
    @overload
    def from_buffer(
        self, cdecl: str, buffer: _Memory, /, require_writable: bool = ...
    ) -> IntCData: ...
    def buffer(self, pointer: CData, size: int = ..., /) -> CBuffer: ...
    def string(self, pointer: CData, maxlen: int = ..., /) -> bytes: ...
    def unpack(self, pointer: IntCData, length: int, /) -> list[int]: ...
    def memmove(self, dest: CData | _Memory, src: CData | _Memory, size: int, /) -> None: ...
    def addressof(self, value: CData, /, *fields: str | int) -> CData: ...
    def sizeof(self, cdecl: str | CData, /) -> int: ...
    def release(self, value: CData, /) -> None: ...
    def gc(
        self, pointer: _Pointer, destructor: Callable[[_Pointer], None] | None, size: int = ..., /
    ) -> _Pointer: ...

class Lib(TierLib, TransferLib):
    """Every function and constant of the three headers."""

    KVP_OK: Final = 0
    KVP_MISS: Final = 1
    KVP_FULL: Final = 2
    KVP_BUSY: Final = 3
    KVP_STALE: Final = 4
    KVP_CORRUPT: Final = 5
    KVP_INVALID: Final = 6
    KVP_SYSTEM: Final = 7
    KVP_CLOSED: Final = 8
    KVP_TIMEOUT: Final = 9
    KVP_PEER: Final = 10
    KVP_CANCELLED: Final = 11

    KVP_ARENA_PIN: Final = 0
    KVP_ARENA_UNPIN: Final = 1
    KVP_ARENA_GRANT: Final = 2
    KVP_ARENA_SETTLE: Final = 3
    KVP_ARENA_RELEASE: Final = 4
    KVP_ARENA_REQUIRE_RESERVED: Final = 5
    KVP_ARENA_REQUIRE_PINNED: Final = 6

    # hash.c
    def kvp_sha256(self, data: CData | bytes, size: int, digest: CData, /) -> None: ...
    def kvp_hash_chain(
        self,
        root: CData | bytes,
        tokens: CData,
        token_count: int,
        block_tokens: int,
        extras: CData | bytes,
        extra_ends: CData,
        out: CData,
        /,
    ) -> int: ...

    # table.c
    def kvp_table_open(self, capacity: int, /) -> CData: ...
    def kvp_table_close(self, table: CData, /) -> None: ...
    def kvp_table_count(self, table: CData, /) -> int: ...
    def kvp_table_put(self, table: CData, hash: CData | bytes, value: int, /) -> int: ...
    def kvp_table_get(self, table: CData, hash: CData | bytes, value: CData, /) -> int: ...
    def kvp_table_add(
        self, table: CData, hashes: CData | bytes, values: CData, count: int, added: CData, /
    ) -> int: ...
    def kvp_table_remove(
        self, table: CData, hashes: CData | bytes, count: int, values: CData, /
    ) -> int: ...
    def kvp_table_match(
        self, table: CData, hashes: CData | bytes, count: int, values: CData, /
    ) -> int: ...
    def kvp_table_sweep(self, table: CData, dead: CData, numbers: int, /) -> int: ...
    def kvp_table_list(self, table: CData, hashes: CData, room: int, /) -> int: ...

    # block_index.c
    def kvp_block_index_open(
        self, hash_bytes: int, capacity: int, set_capacity: int, nodes: int, /
    ) -> CData: ...
    def kvp_block_index_close(self, index: CData, /) -> None: ...
    def kvp_block_index_count(self, index: CData, /) -> int: ...
    def kvp_block_index_add(
        self, index: CData, node: int, hashes: CData | bytes, size: int, /
    ) -> int: ...
    def kvp_block_index_remove(
        self, index: CData, node: int, hashes: CData | bytes, size: int, /
    ) -> None: ...
    def kvp_block_index_clear(self, index: CData, node: int, /) -> None: ...
    def kvp_block_index_holds(self, index: CData, node: int, hash: CData | bytes, /) -> bool: ...
    def kvp_block_index_match(
        self, index: CData, hashes: CData | bytes, size: int, matched: CData, /
    ) -> None: ...
    def kvp_block_index_copy(self, source: CData, target: CData, /) -> int: ...

    # crc32c.c
    def kvp_crc32c(self, crc: int, data: CData | bytes, size: int, /) -> int: ...
    def kvp_crc32c_combine(self, crc_a: int, crc_b: int, size_b: int, /) -> int: ...

    # copy.c
    def kvp_copy_blocks(
        self,
        shape: CData,
        dst: CData,
        dst_blocks: CData,
        src: CData,
        src_blocks: CData,
        block_count: int,
        layer_begin: int,
        layer_end: int,
        crc_expected: CData,
        crc_out: CData,
        crc_block_stride: int,
        bad_block: CData,
        /,
    ) -> int: ...

    # crew.c
    def kvp_crew_open(self, helpers: int, out: CData, /) -> int: ...
    def kvp_crew_close(self, crew: CData, /) -> None: ...
    def kvp_crew_copy_blocks(
        self,
        crew: CData,
        shape: CData,
        dst: CData,
        dst_blocks: CData,
        src: CData,
        src_blocks: CData,
        block_count: int,
        layer_begin: int,
        layer_end: int,
        crc_expected: CData,
        crc_out: CData,
        crc_block_stride: int,
        bad_block: CData,
        /,
    ) -> int: ...
    def kvp_copy_spans(
        self, dst: CData, src: CData, sizes: CData, count: int, cancel: CData, done: CData, /
    ) -> int: ...

    # arena.c
    def kvp_arena_open(
        self,
        slot_count: int,
        slot_bytes: int,
        crc_count: int,
        incarnation: CData | bytes,
        out: CData,
        /,
    ) -> int: ...
    def kvp_arena_close(self, arena: CData, /) -> None: ...
    def kvp_arena_fd(self, arena: CData, /) -> int: ...
    def kvp_arena_base(self, arena: CData, /) -> int: ...
    def kvp_arena_slot_stride(self, arena: CData, /) -> int: ...
    def kvp_arena_reserve(
        self, arena: CData, count: int, grant: bool, slots: CData, generations: CData, /
    ) -> int: ...
    def kvp_arena_change(
        self, arena: CData, step: int, slots: CData, generations: CData, count: int, done: CData, /
    ) -> int: ...
    def kvp_arena_commit(
        self,
        arena: CData,
        slots: CData,
        generations: CData,
        count: int,
        hashes: CData | bytes,
        crcs: CData,
        done: CData,
        /,
    ) -> int: ...
    def kvp_arena_lock(self, arena: CData, /) -> int: ...
    def kvp_memory_node(self, node: int, /) -> int: ...
    def kvp_arena_publish(
        self, arena: CData, slots: CData, lives: CData, count: int, hashes: bytes, crcs: CData, /
    ) -> int: ...
    def kvp_arena_hide(self, arena: CData, slots: CData, count: int, /) -> int: ...
    def kvp_arena_crcs(
        self,
        arena: CData,
        slots: CData,
        generations: CData,
        count: int,
        crcs: CData,
        done: CData,
        /,
    ) -> int: ...
    def kvp_arena_count(self, arena: CData, out: CData, /) -> None: ...

    # bell.c
    def kvp_bell_open(self, out: CData, /) -> int: ...
    def kvp_bell_close(self, bell: CData, /) -> None: ...
    def kvp_bell_ring(self, bell: CData, /) -> None: ...
    def kvp_bell_hush(self, bell: CData, /) -> None: ...
    def kvp_bell_wait(self, bell: CData, /) -> bool: ...
    def kvp_bell_end(self, bell: CData, /) -> None: ...

    # process.c
    def kvp_die_with_parent(self, signal_number: int, /) -> int: ...

    # probe.c
    def kvp_probe_io_uring(self) -> int: ...

ffi: FFI
lib: Lib
