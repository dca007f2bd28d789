"""Two transports for a suite, made anew for each of its tests.

Owns how a suite's transports come to be; the checks are in ``transport_reads``, ``transport_ends``
and ``transport_suite``, which is what an implementation subclasses.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest

from kvpool.arena import Arena
from kvpool.block import BlockLayout
from kvpool.testing.blocks import SMALL_LAYOUT
from kvpool.testing.pair import (
    SLOTS,
    WAIT_S,
    Collected,
    Pair,
)
from kvpool.transfer.base import (
    Endpoint,
    Transport,
)


class TransportScene(ABC):
    """What the parts of the suite share."""

    layout: BlockLayout = SMALL_LAYOUT

    @abstractmethod
    def open_transport(self) -> Transport:
        """Make a transport. All of one suite object can reach each other."""

    @abstractmethod
    def fresh_address(self) -> str:
        """Return an address that nobody listens at."""

    @contextmanager
    def open_pair(self) -> Generator[Pair]:
        """Make an owner and a reader, and take them down."""
        with self.open_transport() as owner, self.open_transport() as reader:
            arena = Arena(self.layout, SLOTS, owner.incarnation)
            region = owner.register(arena)
            connected = Collected()
            address = owner.listen(self.fresh_address(), connected)
            at_reader = reader.connect(address, WAIT_S, owner.incarnation)
            at_owner = connected.wait(1)[0]
            assert isinstance(at_owner, Endpoint)
            yield Pair(owner, reader, address, arena, region, at_owner, at_reader)
            arena.close()

    @pytest.fixture
    def pair(self) -> Iterator[Pair]:
        """Give each test two connected transports."""
        with self.open_pair() as pair:
            yield pair
