"""The bytes of an SSD store that Python writes: its superblock, and how it is laid out.

Owns names of files, geometry, and the superblock's two copies; docs/formats.md has the tables. A
slot's header is ``native/src/ssd_slot.c``'s. Pure but for CRC32C. Who calls it: ``ssd_files``, fsck.
"""

import struct
from dataclasses import dataclass, replace
from typing import Final

from kvpool._native import ffi, lib
from kvpool.block import BlockLayout
from kvpool.errors import ConfigError, CorruptionError, FormatVersionError

VERSION: Final = 1
MAGIC: Final = b"KVPSTORE"
STORE_ID_BYTES: Final = 16
# What direct I/O wants offsets, sizes and addresses to be multiples of.
IO_BYTES: Final = 4096
# One copy of the superblock; two of them lie in its file, and the younger whole one counts.
SUPERBLOCK_BYTES: Final = 4096
SLOT_HEADER_BYTES: Final = 128  # before its checksums and tokens

SUPERBLOCK_FILE: Final = "store.kvp"
INTENT_FILE: Final = "intents.kvp"
INDEX_FOLDER: Final = "index"

# Slots and bytes of a store at most: slots are numbered in 31 bits, and files measured in 63.
_SLOTS_MAX: Final = (1 << 31) - 2
_STORE_BYTES_MAX: Final = (1 << 63) - 1
# A segment is as large as this unless told otherwise, or there would be too many of them.
SEGMENT_BYTES: Final = 4 << 30
_SEGMENTS_MAX: Final = 256
# magic, version, crc, store_id, sequence, opens, clean, index_crc, index_bytes; slot_count,
# segment_slots, header_bytes, slot_bytes; num_layers, kv_heads, block_tokens, k_dim, v_dim, dtype.
_FIELDS: Final = struct.Struct("<8sII16sQQIIQ4Q5I12s")
_CRC_AT: Final = 12


def segment_file(number: int) -> str:
    """Return the name of a segment's file."""
    return f"segment-{number:04d}.kvp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Where slots lie: slot ``s`` is number ``s % segment_slots`` of segment ``s // segment_slots``.

    Attributes:
        layout: What a slot's payload is.
        slot_count: Slots of the store.
        segment_slots: Slots of one segment; the last one may have fewer.
        header_bytes, slot_bytes: Of one slot's header, and of header and payload together.
    """

    layout: BlockLayout
    slot_count: int
    segment_slots: int
    header_bytes: int
    slot_bytes: int

    @classmethod
    def plan(
        cls, layout: BlockLayout, slot_count: int, segment_bytes: int = SEGMENT_BYTES
    ) -> "Geometry":
        """Lay a new store out. Raises ConfigError if it has no slot, or more than can be."""
        if slot_count <= 0:
            raise ConfigError(
                f"an SSD store of {slot_count} slots: give it room for one block of "
                f"{slot_bytes(layout)} bytes",
                size_bytes=slot_bytes(layout),
            )
        size = slot_bytes(layout)
        if slot_count > _SLOTS_MAX or slot_count * size > _STORE_BYTES_MAX:
            raise ConfigError(
                f"an SSD store of {slot_count} slots of {size} bytes: at most {_SLOTS_MAX} slots and "
                f"{_STORE_BYTES_MAX} bytes can be: give the tier fewer bytes",
                size_bytes=slot_count * size,
            )
        segment_slots = max(segment_bytes // size, -(-slot_count // _SEGMENTS_MAX), 1)
        return cls(
            layout=layout,
            slot_count=slot_count,
            segment_slots=min(segment_slots, slot_count),
            header_bytes=_header_bytes(layout),
            slot_bytes=size,
        )

    @property
    def segment_count(self) -> int:
        """How many segments there are."""
        return -(-self.slot_count // self.segment_slots)

    def segment_bytes(self, number: int) -> int:
        """Return the size of a segment's file."""
        slots = min(self.segment_slots, self.slot_count - number * self.segment_slots)
        return slots * self.slot_bytes


def slot_bytes(layout: BlockLayout) -> int:
    """Return how many bytes of a disk one block takes."""
    return _header_bytes(layout) + _whole(layout.block_bytes)


def _header_bytes(layout: BlockLayout) -> int:
    return _whole(SLOT_HEADER_BYTES + 4 * (layout.crc_count + layout.block_tokens))


def _whole(size: int) -> int:
    return -(-size // IO_BYTES) * IO_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Superblock:
    """What a store says of itself.

    Attributes:
        store_id: 16 random bytes, the store's name for life.
        geometry: As it was made.
        sequence: Counts writes of the superblock; the higher one of two copies counts.
        opens: How often it was opened; lives of slots are numbered from ``opens << 40`` on.
        clean: Closed in order: nothing was written since, and the index is whole.
        index_crc, index_bytes: CRC32C and size of the index's file when it was closed.
    """

    store_id: bytes
    geometry: Geometry
    sequence: int = 0
    opens: int = 0
    clean: bool = False
    index_crc: int = 0
    index_bytes: int = 0

    @property
    def first_generation(self) -> int:
        """The first life of this run: above those of any run before."""
        return (self.opens << 40) + 1

    def opened(self) -> "Superblock":
        """Return what to write when the store is opened."""
        return replace(self, sequence=self.sequence + 1, opens=self.opens + 1, clean=False)

    def closed(self, index_crc: int, index_bytes: int) -> "Superblock":
        """Return what to write when the store was closed in order."""
        return replace(
            self,
            sequence=self.sequence + 1,
            clean=True,
            index_crc=index_crc,
            index_bytes=index_bytes,
        )

    def unclean(self, sequence: int) -> "Superblock":
        """Return what to write so that the index is not believed."""
        return replace(self, sequence=sequence, clean=False)

    @property
    def offset(self) -> int:
        """Where in its file this one is written: not where the one before it lies."""
        return self.sequence % 2 * SUPERBLOCK_BYTES

    def encode(self) -> bytes:
        """Return one copy, ``SUPERBLOCK_BYTES`` long."""
        geometry, layout = self.geometry, self.geometry.layout
        copy = bytearray(SUPERBLOCK_BYTES)
        _FIELDS.pack_into(
            copy,
            0,
            MAGIC,
            VERSION,
            0,
            self.store_id,
            self.sequence,
            self.opens,
            self.clean,
            self.index_crc,
            self.index_bytes,
            geometry.slot_count,
            geometry.segment_slots,
            geometry.header_bytes,
            geometry.slot_bytes,
            layout.num_layers,
            layout.kv_heads,
            layout.block_tokens,
            layout.k_dim,
            layout.v_dim,
            layout.dtype.encode(),
        )
        struct.pack_into("<I", copy, _CRC_AT, crc32c(bytes(copy)))
        return bytes(copy)


def decode_superblock(copies: bytes, path: str) -> Superblock:
    """Return the younger whole one of two copies.

    Raises:
        FormatVersionError: Neither is whole, and one is of another version of the format.
        CorruptionError: Neither is whole.
    """
    both = [copies[at : at + SUPERBLOCK_BYTES] for at in (0, SUPERBLOCK_BYTES)]
    whole = [found for copy in both if (found := _decode(copy)) is not None]
    if whole:
        return max(whole, key=lambda superblock: superblock.sequence)
    for copy in both:
        if copy[:8] == MAGIC and len(copy) >= 12:
            (version,) = struct.unpack_from("<I", copy, 8)
            if version != VERSION:
                raise FormatVersionError(
                    f"{path} has version {version} of the format and this kvpool reads version "
                    f"{VERSION}: use the kvpool that wrote it, or remove the folder",
                    path=path,
                )
    raise CorruptionError(
        f"both copies of {path} are damaged: blocks in this store cannot be told; remove the folder",
        path=path,
    )


def whole_copies(copies: bytes) -> set[int]:
    """Return which of the two copies are whole: 0, 1, both or none."""
    both = (copies[at : at + SUPERBLOCK_BYTES] for at in (0, SUPERBLOCK_BYTES))
    return {number for number, copy in enumerate(both) if _decode(copy) is not None}


def _decode(copy: bytes) -> Superblock | None:
    if len(copy) != SUPERBLOCK_BYTES:
        return None
    zeroed = copy[:_CRC_AT] + bytes(4) + copy[_CRC_AT + 4 :]
    fields = _FIELDS.unpack_from(copy)
    if fields[:2] != (MAGIC, VERSION) or fields[2] != crc32c(zeroed):
        return None
    _, _, _, store_id, sequence, opens, clean, index_crc, index_bytes, *rest = fields
    slot_count, segment_slots, header_bytes, size, *dims, dtype = rest
    layout = BlockLayout(
        num_layers=dims[0],
        kv_heads=dims[1],
        block_tokens=dims[2],
        k_dim=dims[3],
        v_dim=dims[4],
        dtype=dtype.rstrip(b"\0").decode(),
    )
    return Superblock(
        store_id=store_id,
        geometry=Geometry(
            layout=layout,
            slot_count=slot_count,
            segment_slots=segment_slots,
            header_bytes=header_bytes,
            slot_bytes=size,
        ),
        sequence=sequence,
        opens=opens,
        clean=bool(clean),
        index_crc=index_crc,
        index_bytes=index_bytes,
    )


def crc32c(payload: bytes, crc: int = 0) -> int:
    """Continue a CRC32C over bytes."""
    return lib.kvp_crc32c(crc, ffi.from_buffer("uint8_t[]", payload), len(payload))
