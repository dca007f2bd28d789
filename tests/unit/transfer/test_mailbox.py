"""Mailboxes in one process."""

import os

import pytest

from kvpool.block import new_incarnation
from kvpool.errors import ClosedError, CorruptionError, StaleIncarnationError
from kvpool.transfer.base import NOTIFICATION_BYTES_MAX
from kvpool.transfer.mailbox import RECORD_COUNT, Mailbox


def joined() -> tuple[Mailbox, Mailbox]:
    names = (new_incarnation(), new_incarnation())
    left, right = Mailbox(names[0]), Mailbox(names[1])
    left.attach(right.fd, names[1])
    right.attach(left.fd, names[0])
    return left, right


def test_records_travel_both_ways_in_order() -> None:
    left, right = joined()
    for number in range(3 * RECORD_COUNT):
        assert left.push(b"%d" % number)
        assert right.push(b"-%d" % number)
        assert right.pop() == b"%d" % number
        assert left.pop() == b"-%d" % number
    assert left.pop() is None
    largest = os.urandom(NOTIFICATION_BYTES_MAX)
    assert left.push(largest)
    assert right.pop() == largest


def test_a_full_ring_takes_no_more_until_it_is_read() -> None:
    left, right = joined()
    for _ in range(RECORD_COUNT):
        assert left.push(b"x")
    assert not left.push(b"x")
    assert right.pop() == b"x"
    assert left.push(b"x")
    assert not left.push(b"x")


def test_a_size_out_of_range_is_refused() -> None:
    left, _ = joined()
    for payload in (b"", bytes(NOTIFICATION_BYTES_MAX + 1)):
        with pytest.raises(CorruptionError):
            left.push(payload)


def test_only_the_ring_of_the_named_run_is_attached() -> None:
    left, right = Mailbox(new_incarnation()), Mailbox(new_incarnation())
    with pytest.raises(StaleIncarnationError):
        left.attach(right.fd, new_incarnation())
    unsealed = os.memfd_create("unsealed")
    with pytest.raises(CorruptionError):
        left.attach(unsealed, new_incarnation())
    os.close(unsealed)


def test_a_closed_mailbox_gives_and_takes_nothing() -> None:
    left, right = joined()
    assert right.push(b"x")
    left.close()
    left.close()
    assert not left.push(b"x")
    assert left.pop() is None
    with pytest.raises(ClosedError):
        left.attach(right.fd, new_incarnation())
    assert right.push(b"to nobody")
