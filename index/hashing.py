"""Chained block hashes: the names of the full blocks of a prompt.

Owns the check of tokens before they reach the C core, which hashes. Knows no namespace: it is given
the root. Who calls it: the pool.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvpool._native import ffi, lib
from kvpool.block import HASH_BYTES, BlockHash
from kvpool.errors import InternalError, UsageError

_UINT32_MAX = (1 << 32) - 1


def as_tokens(tokens: Sequence[int] | NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return tokens as a contiguous uint32 array, without a copy if they are one already.

    Raises:
        UsageError: They are no flat sequence of integers within 0..2**32-1.
    """
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.uint32:
        array = tokens
    else:
        try:
            wide = np.asarray(tokens)
        except (ValueError, OverflowError) as error:
            raise UsageError(f"tokens are no flat sequence of integers: {error}") from error
        if wide.size == 0:
            wide = wide.astype(np.uint32)
        if wide.dtype.kind not in "iu":
            raise UsageError(f"tokens are of dtype {wide.dtype}: they must be integers")
        if wide.size and not (0 <= wide.min() and wide.max() <= _UINT32_MAX):
            raise UsageError("a token is not within 0..4294967295")
        array = wide.astype(np.uint32)
    if array.ndim != 1:
        raise UsageError(f"tokens have {array.ndim} dimensions: pass one prompt, flat")
    return np.ascontiguousarray(array)


def hash_chain(
    root: BlockHash,
    tokens: Sequence[int] | NDArray[np.uint32],
    block_tokens: int,
    extras: Sequence[bytes] | None = None,
) -> bytes:
    """Hash the full blocks of ``tokens``, each bound to all before it.

    Args:
        root: Digest of the namespace, 32 bytes.
        tokens: The prompt. A trailing partial block is left out.
        block_tokens: Tokens of a block, above 0.
        extras: What else names each full block (say, hashes of its images), one item a block.

    Returns:
        The hashes, 32 bytes each, concatenated.

    Raises:
        UsageError: The arguments do not fit. Nothing was hashed.

    Linear, without the GIL. Safe from any thread.
    """
    array = as_tokens(tokens)
    if block_tokens <= 0:
        raise UsageError(f"block_tokens is {block_tokens}: it must be above 0")
    if len(root) != HASH_BYTES:
        raise UsageError(f"a root of {len(root)} bytes: it has {HASH_BYTES}")
    count = array.size // block_tokens
    if count == 0 and not extras:
        return b""
    extra_bytes, ends = b"", ffi.NULL
    if extras is not None:
        if len(extras) != count:
            raise UsageError(f"{len(extras)} extras for {count} full blocks: one a block is needed")
        extra_bytes = b"".join(extras)
        sizes = np.fromiter((len(extra) for extra in extras), dtype=np.uintp, count=count)
        ends = ffi.from_buffer("size_t[]", np.cumsum(sizes, dtype=np.uintp))
    out = np.empty(count * HASH_BYTES, dtype=np.uint8)
    status = lib.kvp_hash_chain(
        root,
        ffi.from_buffer("uint32_t[]", array),
        array.size,
        block_tokens,
        extra_bytes,
        ends,
        ffi.from_buffer("uint8_t[]", out, require_writable=True),
    )
    if status != lib.KVP_OK:
        raise InternalError(f"kvp_hash_chain answered {status}")
    return out.tobytes()
