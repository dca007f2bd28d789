"""Rows of the index: hashing and matching a prompt against one hash over the same bytes.

A prompt of 131,072 tokens in blocks of 16, as a uint32 array, all of it in the index. The same bytes
are what the chain hashes: each block's tokens after its parent's hash, 768 KiB
(docs/decisions/0005-hash-reference.md).
"""

import hashlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import numpy as np

from kvpool.block import HASH_BYTES, BlockHash, sha256
from kvpool.cli.bench import Case, Sides, Timer
from kvpool.errors import InternalError
from kvpool.index.hashing import hash_chain
from kvpool.index.prefix import PrefixIndex

_TOKENS: Final = 131072
_BLOCK_TOKENS: Final = 16
# Prompts of one sample: some 10 ms.
_REPEATS: Final = 8


def cases(quick: bool) -> list[Case]:
    """Return the rows of this subject."""
    return [
        Case(
            name=f"index.match.{_TOKENS}",
            unit="ms",
            reference="one SHA-256 over the same bytes, the quicker of kvpool's and OpenSSL's",
            open=_open,
            lower_is_better=True,
        )
    ]


class _Match:
    ceiling: float | None = None

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        generator = np.random.default_rng(0)
        self._tokens = generator.integers(0, 1 << 17, _TOKENS, dtype=np.uint32)
        self._root = BlockHash(bytes(HASH_BYTES))
        hashes = hash_chain(self._root, self._tokens, _BLOCK_TOKENS)
        count = len(hashes) // HASH_BYTES
        self._index = PrefixIndex(2 * count)
        self._index.add(hashes, np.arange(count, dtype=np.uint64))
        self._found = count
        parents = self._root + hashes[:-HASH_BYTES]
        blocks = self._tokens.reshape(count, _BLOCK_TOKENS)
        self.hashed = b"".join(
            parents[at * HASH_BYTES : (at + 1) * HASH_BYTES] + blocks[at].tobytes()
            for at in range(count)
        )

    def value(self) -> float:
        began = self._timer()
        for _ in range(_REPEATS):
            found = self._index.match(hash_chain(self._root, self._tokens, _BLOCK_TOKENS))
            if found != self._found:
                raise InternalError(f"{found} of {self._found} blocks were found")
        return (self._timer() - began) / _REPEATS * 1e3

    def reference(self) -> float:
        times: list[float] = []
        for digest in (sha256, hashlib.sha256):
            began = self._timer()
            for _ in range(_REPEATS):
                digest(self.hashed)
            times.append(self._timer() - began)
        return min(times) / _REPEATS * 1e3


@contextmanager
def _open(timer: Timer) -> Generator[Sides, None, None]:
    yield _Match(timer)
