"""Rows of the index: hashing and matching a prompt against one hash over the same bytes.

A prompt of 131,072 tokens in blocks of 16, as a uint32 array, all of it in the index.
"""

import hashlib
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import numpy as np

from kvpool.block import HASH_BYTES, BlockHash, sha256
from kvpool.cli.bench import Case, Sides
from kvpool.index.hashing import hash_chain
from kvpool.index.prefix import PrefixIndex

_TOKENS: Final = 131072
_BLOCK_TOKENS: Final = 16


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
    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self._tokens = generator.integers(0, 1 << 17, _TOKENS, dtype=np.uint32)
        self._root = BlockHash(bytes(HASH_BYTES))
        hashes = hash_chain(self._root, self._tokens, _BLOCK_TOKENS)
        count = len(hashes) // HASH_BYTES
        self._index = PrefixIndex(2 * count)
        for number in range(count):
            key = BlockHash(hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES])
            self._index.put(key, number)
        self._found = count

    def value(self) -> float:
        began = time.perf_counter()
        hashes = hash_chain(self._root, self._tokens, _BLOCK_TOKENS)
        found = self._index.match(hashes)
        took_s = time.perf_counter() - began
        assert found == self._found
        return took_s * 1e3

    def reference(self) -> float:
        payload = self._tokens.tobytes()
        times: list[float] = []
        for digest in (sha256, hashlib.sha256):
            began = time.perf_counter()
            digest(payload)
            times.append(time.perf_counter() - began)
        return min(times) * 1e3


@contextmanager
def _open() -> Generator[Sides, None, None]:
    yield _Match()
