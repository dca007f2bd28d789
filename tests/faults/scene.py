"""One transport and two owners it is connected to: one to which something happens, and a lively one.

Whatever happens to one peer: every read of it ends within its deadline, whole or with a typed error;
its destination is then nobody's; and another peer's blocks come meanwhile. Bytes are counted, not
seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from kvpool.completion import Completion
from kvpool.errors import KVPoolError, PeerUnreachableError, TransferTimeoutError
from kvpool.testing.pair import empty
from kvpool.transfer.ucx import UcxTransport
from tests.faults.owner import Owner
from tests.faults.peer import LAYOUT, WAIT_S, Peer
from tests.waiting import until

# Read at once: at 10 Mbit/s it takes three times SHORT_S.
BLOCKS = 80
READS = 12
# The deadline of what may time out.
SHORT_S = 0.5
# A silent peer is lost after this.
HEARTBEAT_S = 3.0
# What ends a read when nobody says anything: its deadline, or somebody has waited long enough.
LATE = (TransferTimeoutError, PeerUnreachableError)


@dataclass
class Fault:
    """What happens to a peer.

    Attributes:
        strike: Makes it happen.
        errors: What may end a read for it.
        mend: Undoes it; None if nothing can.
        fails: Whether a read that begins under it cannot succeed.
    """

    strike: Callable[[Peer], object]
    errors: tuple[type[KVPoolError], ...]
    mend: Callable[[Peer], object] | None = None
    fails: bool = True


class Scene:
    """The transport and the owners. ``before``, ``during`` and ``after`` are what is tested."""

    def __init__(self, transport: UcxTransport, victim: Owner, lively: Owner, fault: Fault) -> None:
        self.transport = transport
        self.fault = fault
        self.lively = lively.through(transport)
        self.others = transport.counts()["endpoints"]
        self.victim = victim.through(transport)
        self.outs = [empty(LAYOUT, BLOCKS) for _ in range(READS)]
        self.reads: list[Completion[int]] = []

    def before(self) -> None:
        """It happens before a read begins."""
        self._strike()
        self._read()
        self._require_exact(self.lively)
        assert not (self._end() and self.fault.fails)
        self._finish()

    def during(self) -> None:
        """It happens while reads are under way."""
        first = self.victim.read(self.outs[0], WAIT_S)
        self._read()
        first.wait(WAIT_S)  # it is in the middle of the others
        self._strike()
        self._require_exact(self.lively)
        self._end()
        self._finish()

    def after(self) -> None:
        """It happens when reads have ended; later ones find it."""
        reads = [self.victim.read(out, WAIT_S) for out in self.outs]
        for read, out in zip(reads, self.outs, strict=True):
            assert read.wait(WAIT_S) == BLOCKS
            np.testing.assert_array_equal(out, self.victim.blocks)
            out[:] = 7
        self._strike()
        self._require_harmless()
        self._read()
        assert not (self._end() and self.fault.fails)
        self._finish()

    def _strike(self) -> None:
        self.fault.strike(self.victim.peer)

    def _read(self) -> None:
        """Begin to read the victim, unless it is known to be gone."""
        # What is not meant to be late may take as long as a busy machine needs.
        deadline_s = SHORT_S if TransferTimeoutError in self.fault.errors else WAIT_S
        self.reads = []
        for out in self.outs:
            try:
                self.reads.append(self.victim.read(out, deadline_s))
            except PeerUnreachableError:
                assert not self.victim.endpoint.alive()

    def _end(self) -> int:
        """Wait until every read has ended as it may; return how many came whole."""
        whole = 0
        for read, out in zip(self.reads, self.outs, strict=False):
            try:
                assert read.wait(WAIT_S) == BLOCKS
                np.testing.assert_array_equal(out, self.victim.blocks)
                whole += 1
            except self.fault.errors:
                pass
            assert read.done()
        for out in self.outs:
            out[:] = 7
        return whole

    def _require_exact(self, owner: Owner) -> None:
        assert owner.require_exact() == owner.blocks.nbytes

    def _require_harmless(self) -> None:
        """The lively owner is read as ever, and nothing writes to what the victim's reads had."""
        self._require_exact(self.lively)
        assert all(bool((out == 7).all()) for out in self.outs)

    def _require_forgotten(self) -> None:
        """The endpoint to the victim goes, and its inbox with it."""
        until(lambda: not self.victim.endpoint.alive())
        until(lambda: self.transport.counts()["endpoints"] == self.others)

    def _finish(self) -> None:
        """A peer that can be mended is read again, on a new connection if need be; another is gone."""
        self._require_harmless()
        if self.fault.mend is None:
            self._require_forgotten()
            with pytest.raises(PeerUnreachableError):
                self.victim.connect()
            return
        self.fault.mend(self.victim.peer)
        for _ in range(3):  # a connection may be found dead only when it is used
            if not self.victim.endpoint.alive():
                self._require_forgotten()
                self.victim.connect()
            try:
                self._require_exact(self.victim)
                break
            except PeerUnreachableError:
                pass
        else:
            pytest.fail("a peer that is well again cannot be read")
        self._require_harmless()
