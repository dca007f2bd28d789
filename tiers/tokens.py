"""The tokens of some blocks, as far as they are known.

Owns nothing but the rows. A block that was stored by its hash alone has no tokens, and may be any. Who
calls it: the tiers that keep tokens beside blocks, and the stack, which hands them on.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import UsageError


@dataclass(frozen=True, slots=True)
class TokenRows:
    """One row a block.

    Attributes:
        values: uint32 [blocks, block_tokens]; a row that is not known is undefined.
        known: Which rows are.
    """

    values: NDArray[np.uint32]
    known: NDArray[np.bool_]

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or self.known.shape != (len(self.values),):
            raise UsageError(f"tokens of shape {self.values.shape} for {len(self.known)} blocks")
        if self.values.dtype != np.uint32 or self.known.dtype != np.bool_:  # C fills them in
            raise UsageError(f"tokens of type {self.values.dtype}, marked by {self.known.dtype}")

    @classmethod
    def unknown(cls, count: int, block_tokens: int) -> Self:
        """Return rows that are not known, to be filled in."""
        return cls(np.zeros((count, block_tokens), np.uint32), np.zeros(count, np.bool_))

    def __len__(self) -> int:
        return len(self.known)

    def take(self, begin: int, end: int) -> "TokenRows":
        """Return rows ``begin`` to ``end`` (exclusive, cut at the last)."""
        return TokenRows(self.values[begin:end], self.known[begin:end])

    def only(self, rows: NDArray[np.bool_]) -> "TokenRows":
        """Return the rows that are marked."""
        return TokenRows(self.values[rows], self.known[rows])

    def leading_same(self, tokens: NDArray[np.uint32]) -> int:
        """Count the leading rows that are these tokens, or may be because they are not known."""
        if tokens.shape != self.values.shape:
            raise UsageError(
                f"tokens of shape {tokens.shape} where {self.values.shape} is expected"
            )
        other = np.flatnonzero(self.known & (self.values != tokens).any(axis=1))
        return int(other[0]) if len(other) else len(self)
