"""The loopback transport passes the suite of transports, and the suite fails on planted bugs."""

import itertools
from collections.abc import Sequence

from kvpool.block import BlockLayout, Incarnation
from kvpool.completion import Completion, CompletionSource
from kvpool.errors import KVPoolError
from kvpool.memory import BlockView, Crcs
from kvpool.testing.lossy import LossyEndpoint, LossyTransport
from kvpool.testing.planted import failing_tests
from kvpool.testing.transport_suite import TransportSuite
from kvpool.transfer.base import Endpoint, RemoteSlots, SlotSpan, Transport
from kvpool.transfer.loopback import LoopbackNetwork, LoopbackTransport


class TestLoopbackTransport(TransportSuite):
    network = LoopbackNetwork()
    numbers = itertools.count()

    def open_transport(self) -> Transport:
        return LoopbackTransport(self.network)

    def fresh_address(self) -> str:
        return f"loopback-{next(self.numbers)}"


class _TrustingEndpoint(LossyEndpoint):
    """Planted bugs: whatever a read delivers, all of it counts as good."""

    def read_blocks(
        self,
        dest: BlockView,
        source: RemoteSlots,
        *,
        source_layout: BlockLayout,
        dest_layer: int | None,
        deadline_s: float,
        crcs: Crcs | None = None,
        sums: Crcs | None = None,
    ) -> Completion[int]:
        inner = super().read_blocks(
            dest,
            source,
            source_layout=source_layout,
            dest_layer=dest_layer,
            deadline_s=deadline_s,
            crcs=crcs,
            sums=sums,
        )
        outer: CompletionSource[int] = CompletionSource()

        def ended() -> None:
            try:
                inner.result()
                outer.finish(len(source.slots))
            except KVPoolError as error:
                outer.fail(error)

        inner.add_done_callback(ended)
        return outer.completion

    def write_spans(
        self, pairs: Sequence[tuple[SlotSpan, SlotSpan]], deadline_s: float, note: bytes = b""
    ) -> Completion[int]:
        """And however a write ends, it counts as done."""
        outer: CompletionSource[int] = CompletionSource()
        total = sum(there.size for _, there in pairs)
        inner = super().write_spans(pairs, deadline_s, note)
        inner.add_done_callback(lambda: outer.finish(total))
        return outer.completion


class _TrustingTransport(LossyTransport):
    def connect(
        self, address: str, timeout_s: float, expected: Incarnation | None = None
    ) -> Endpoint:
        return _TrustingEndpoint(self._inner.connect(address, timeout_s, expected), self)


class _TrustingSuite(TestLoopbackTransport):
    def open_transport(self) -> Transport:
        return _TrustingTransport(LoopbackTransport(self.network), seed=1)


def test_the_suite_fails_on_a_transport_that_trusts_what_it_reads() -> None:
    suite = _TrustingSuite()
    assert set(failing_tests(suite, suite.open_pair)) >= {
        "test_a_flipped_byte_ends_the_leading_blocks",
        "test_a_stale_generation_ends_the_leading_blocks",
        "test_checksums_of_the_caller_are_what_counts",
        "test_slots_that_are_not_to_be_written_are_not",
        "test_a_passed_deadline_ends_a_write",
    }
