"""What a block is: its identity (namespace, hash) and its shape (layout, parts, layer slices).

Owns the canonical payload order: layer, head, K then V, token, dim. Knows nothing of where blocks
are kept. Who calls it: every wing.
"""

import os
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NewType

from kvpool._native import ffi, lib
from kvpool.errors import LayoutMismatchError, UsageError

BlockHash = NewType("BlockHash", bytes)  # 32 bytes
NodeId = NewType("NodeId", str)
SlotIndex = NewType("SlotIndex", int)
Incarnation = NewType("Incarnation", bytes)  # 16 random bytes, one run of one process

HASH_BYTES: Final = 32
INCARNATION_BYTES: Final = 16

# Sizes of the KV dtypes that a layout can name, in bytes per number.
DTYPE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1, "uint8": 1}

# Sizes are int64 in files and shared memory, dimensions uint32: what does not fit would wrap there.
_BLOCK_BYTES_MAX: Final = (1 << 63) - 1
_DIMENSION_MAX: Final = (1 << 32) - 1


def new_incarnation() -> Incarnation:
    """Return a fresh random name for one run of a process."""
    return Incarnation(os.urandom(INCARNATION_BYTES))


def sha256(payload: bytes) -> bytes:
    """Return the SHA-256 of ``payload``, 32 bytes, from the C core."""
    digest = ffi.new("uint8_t[32]")
    lib.kvp_sha256(ffi.from_buffer("uint8_t[]", payload), len(payload), digest)
    return bytes(ffi.buffer(digest))


def _length_prefixed(*texts: str) -> bytes:
    """Encode texts so that no two different tuples have the same bytes."""
    parts = [text.encode("utf-8", "surrogatepass") for text in texts]
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A (group, layer range, head range) of one block: what one worker of a sharded model holds.

    Attributes:
        group: Number of the attention group (0 for models whose layers are all alike).
        layer_begin, layer_end: Layers of the model, ``0 <= begin < end``.
        head_begin, head_end: KV heads of the model, ``0 <= begin < end``.
    """

    group: int = 0
    layer_begin: int
    layer_end: int
    head_begin: int
    head_end: int

    def __post_init__(self) -> None:
        if not (0 <= self.layer_begin < self.layer_end and 0 <= self.head_begin < self.head_end):
            raise UsageError(f"{self} has an empty or negative range")

    def key(self, block: BlockHash) -> BlockHash:
        """Return the 32-byte name under which a tier keeps this part of ``block``."""
        fields = (self.group, self.layer_begin, self.layer_end, self.head_begin, self.head_end)
        return BlockHash(sha256(b"part" + block + struct.pack("<5I", *fields)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """The shape of a block's payload in canonical order: layer, head, K then V, token, dim.

    Attributes:
        num_layers: Layers in the payload.
        kv_heads: KV heads in the payload (1 for latent attention).
        block_tokens: Tokens of a block, a multiple of 16.
        k_dim, v_dim: Numbers per token and head of K and of V. They differ for latent attention.
        dtype: A key of ``DTYPE_BYTES``.
    """

    num_layers: int
    kv_heads: int
    block_tokens: int
    k_dim: int
    v_dim: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise UsageError(f"dtype {self.dtype!r} is not one of {sorted(DTYPE_BYTES)}")
        if self.block_tokens <= 0 or self.block_tokens % 16:
            raise UsageError(f"block_tokens is {self.block_tokens}: use a positive multiple of 16")
        if min(self.num_layers, self.kv_heads, self.k_dim) <= 0 or self.v_dim < 0:
            raise UsageError(f"{self} has a dimension that is not positive")
        longest = max(
            self.num_layers,
            self.kv_heads,
            self.block_tokens,
            self.k_dim,
            self.v_dim,
            self.crc_count,
        )
        if longest > _DIMENSION_MAX or self.block_bytes > _BLOCK_BYTES_MAX:
            raise UsageError(f"{self} is no block that memory can hold: look at its dimensions")

    @property
    def k_row_bytes(self) -> int:
        """Bytes of one token's K of one head."""
        return self.k_dim * DTYPE_BYTES[self.dtype]

    @property
    def v_row_bytes(self) -> int:
        """Bytes of one token's V of one head."""
        return self.v_dim * DTYPE_BYTES[self.dtype]

    @property
    def head_bytes(self) -> int:
        """Bytes of K and V of one head of one layer: the unit that has a CRC32C."""
        return self.block_tokens * (self.k_row_bytes + self.v_row_bytes)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer slice."""
        return self.kv_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of the whole payload."""
        return self.num_layers * self.layer_bytes

    @property
    def crc_count(self) -> int:
        """CRC32C values of a block, one per (layer, head)."""
        return self.num_layers * self.kv_heads

    def part(self) -> Part:
        """Return the part that holds every layer and head of this layout."""
        return Part(layer_begin=0, layer_end=self.num_layers, head_begin=0, head_end=self.kv_heads)

    def require_equal(self, other: "BlockLayout") -> None:
        """Raise LayoutMismatchError, naming the fields, unless ``other`` is the same layout."""
        if self is other:
            return
        differing = [
            f"{name} {getattr(self, name)!r} != {getattr(other, name)!r}"
            for name in self.__slots__
            if getattr(self, name) != getattr(other, name)
        ]
        if differing:
            raise LayoutMismatchError(f"block layouts differ: {', '.join(differing)}")


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """Everything that must be equal before two processes may share a block.

    Attributes:
        model: Model id, as a person names it.
        weights: Fingerprint of the weights: hex of a cryptographic hash.
        compute_dtype, kv_dtype: Of the forward pass, and of the stored numbers.
        quantisation: Of weights and KV, ``""`` for none.
        block_tokens: Tokens of a block, a multiple of 16.
        layout: Id of the payload's order, ``"canonical-1"`` for kvpool's own.
        adapter: LoRA name and version, ``""`` for none.
        salt: Tenant's secret; without it nobody can name, match or read a block.

    There is no tensor-parallel rank in it: shards are parts of one block.
    """

    model: str
    weights: str
    compute_dtype: str
    kv_dtype: str
    block_tokens: int
    quantisation: str = ""
    layout: str = "canonical-1"
    adapter: str = ""
    salt: str = ""

    def __post_init__(self) -> None:
        if self.block_tokens <= 0 or self.block_tokens % 16:
            raise UsageError(f"block_tokens is {self.block_tokens}: use a positive multiple of 16")

    @cached_property
    def digest(self) -> BlockHash:
        """The 32-byte root of every chain in this namespace."""
        names = ("model", "weights", "compute_dtype", "kv_dtype", "quantisation", "layout")
        texts = [getattr(self, name) for name in (*names, "adapter", "salt")]
        encoded = _length_prefixed("kvpool-namespace-1", *texts)
        return BlockHash(sha256(encoded + struct.pack("<I", self.block_tokens)))


@dataclass(frozen=True, slots=True)
class LayerSlice:
    """One layer of one part of one block: the unit that is streamed.

    Attributes:
        block_index: Position of the block in its chain, from 0.
        layer: Layer of the model.
    """

    block_index: int
    layer: int
