"""A store below a stack that hangs, fails and falls short when a test says so.

Wraps a real one; with nothing asked for it only passes on. Keeps deadlines, as a real one does.
"""

import threading
from collections.abc import Sequence

import numpy as np

from kvpool.arena import Slot, Slots
from kvpool.block import BlockHash
from kvpool.errors import TransferTimeoutError, UnavailableError
from kvpool.memory import BlockView, Crcs
from kvpool.tiers.base import TierStats
from kvpool.tiers.flusher import SlowStore
from kvpool.tiers.tokens import TokenRows


class FaultyStore(SlowStore):
    """Wraps a store. Safe from any thread.

    Args:
        inner: The store that does the work. This one closes it.

    Attributes:
        open_gate: While clear, reads and writes hang, until their deadline at most.
        failing: While set, reads and writes fail with UnavailableError.
        write_blocks_max: Blocks that one write takes at most.
        writes, reads: Calls that reached the inner store.
        waiting: How many calls hang at the gate.
        gated: How many calls ever came there.
    """

    def __init__(self, inner: SlowStore) -> None:
        self.name = inner.name
        self.layout = inner.layout
        self.open_gate = threading.Event()
        self.open_gate.set()
        self.failing = threading.Event()
        self.write_blocks_max = 1 << 20
        self.writes = self.reads = self.waiting = self.gated = 0
        self._inner = inner
        self._lock = threading.Lock()

    def write(
        self,
        keys: bytes,
        parent: BlockHash | None,
        source: BlockView,
        *,
        crcs: Crcs | None = None,
        tokens: TokenRows | None = None,
        deadline_s: float,
    ) -> int:
        """Write, or hang, or fail, or take only some."""
        if not self._pass(deadline_s):
            raise TransferTimeoutError("a fault was asked for: the store hangs")
        self.writes += 1
        count = min(len(source), self.write_blocks_max)
        return self._inner.write(
            keys[: count * 32],
            parent,
            source.take(0, count),
            crcs=None if crcs is None else crcs[:count],
            tokens=None if tokens is None else tokens.take(0, count),
            deadline_s=deadline_s,
        )

    def read(
        self,
        slots: Sequence[Slot],
        dest: BlockView,
        *,
        tokens: TokenRows | None = None,
        deadline_s: float,
    ) -> tuple[int, Crcs]:
        """Read, or hang until the deadline and give nothing, or fail."""
        if not self._pass(deadline_s):
            return 0, np.empty((0, self.layout.num_layers, self.layout.kv_heads), dtype=np.uint32)
        self.reads += 1
        return self._inner.read(slots, dest, tokens=tokens, deadline_s=deadline_s)

    def durable(self, keys: bytes) -> int:
        """Pass on."""
        return self._inner.durable(keys)

    def match(self, keys: bytes) -> int:
        """Pass on."""
        return self._inner.match(keys)

    def pin(self, keys: bytes) -> Slots:
        """Pass on."""
        return self._inner.pin(keys)

    def hold(self, keys: bytes) -> Slots:
        """Pass on."""
        return self._inner.hold(keys)

    def blocks(self) -> tuple[bytes, bytes]:
        """Pass on."""
        return self._inner.blocks()

    def unpin(self, slots: Sequence[Slot]) -> None:
        """Pass on."""
        self._inner.unpin(slots)

    def drop(self, key: BlockHash, reason: str) -> bool:
        """Pass on."""
        return self._inner.drop(key, reason)

    def stats(self) -> TierStats:
        """Pass on."""
        return self._inner.stats()

    def close(self) -> None:
        """Close the inner store."""
        self._inner.close()

    def _pass(self, deadline_s: float) -> bool:
        """Wait at the gate; False if the deadline came first."""
        with self._lock:
            self.gated += 1
            self.waiting += 1
        try:
            passed = self.open_gate.wait(deadline_s)
        finally:
            with self._lock:
                self.waiting -= 1
        if self.failing.is_set():
            raise UnavailableError("a fault was asked for: the store fails", tier=self.name)
        return passed
