"""Layer streams that fail: on both sides, with a typed error, and with every slot back."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvpool.errors import (
    CancelledTransferError,
    ClosedError,
    CorruptionError,
    KVPoolError,
    LayoutMismatchError,
    PeerUnreachableError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.testing.lossy import Faults
from tests.unit.transfer.streams import (
    BLOCKS,
    LAYERS,
    LAYOUT,
    SHARE,
    WAIT_S,
    Two,
    fails,
    sender_fails,
)


@pytest.fixture
def two() -> Iterator[Two]:
    two = Two()
    yield two
    two.close()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("faults", [Faults(drop=0.1), Faults(short=0.2), Faults(lose=0.05)])
def test_under_faults_a_stream_is_exact_or_a_typed_error(faults: Faults, seed: int) -> None:
    two = Two(seed=seed)
    two.here.faults = two.there.faults = faults
    receiver = two.expect(deadline_s=0.5)
    try:
        sender = two.open(deadline_s=0.5)
        two.send(sender)
        sender.finish(b"tail", deadline_s=0.5)
    except KVPoolError as error:
        assert isinstance(
            error,
            CancelledTransferError | ClosedError | CorruptionError | PeerUnreachableError
            | TransferTimeoutError,
        )  # fmt: skip
    try:
        assert receiver.completion.wait(WAIT_S) == b"tail"
        np.testing.assert_array_equal(two.out, two.blocks)
    except KVPoolError as error:
        assert not isinstance(error, UsageError)
    assert receiver.completion.done()
    two.endpoint.close()
    two.require_free()
    two.close()


def test_a_slice_that_is_short_at_the_receiver_fails_both_sides(two: Two) -> None:
    two.there.faults = Faults(short=1.0)
    receiver, sender = two.expect(), two.open()
    two.send(sender, range(1))
    fails(receiver, CorruptionError)
    sender_fails(sender, CorruptionError)
    two.require_free()


def test_abort_fails_the_receiver(two: Two) -> None:
    receiver, sender = two.expect(), two.open()
    two.send(sender, range(1))
    assert receiver.completion.wait_layer(0, WAIT_S)
    sender.abort("out of memory")
    sender.abort("idempotent")
    with pytest.raises(CancelledTransferError, match="out of memory"):
        receiver.completion.wait(WAIT_S)
    with pytest.raises(CancelledTransferError):
        two.send(sender, range(1, 2))
    with pytest.raises(CancelledTransferError):
        sender.finish(b"", deadline_s=WAIT_S)
    two.require_free()


def test_cancel_fails_the_sender(two: Two) -> None:
    receiver, sender = two.expect(), two.open()
    two.send(sender, range(1))
    assert receiver.completion.wait_layer(0, WAIT_S)  # before that the stream may be nobody's
    receiver.cancel("client went away")
    receiver.cancel("idempotent")
    fails(receiver, CancelledTransferError)

    sender_fails(sender, CancelledTransferError, "client went away")
    two.require_free()
    # The same request may be tried again.
    receiver, sender = two.expect(), two.open()
    two.send(sender)
    sender.finish(b"again", deadline_s=WAIT_S)
    assert receiver.completion.wait(WAIT_S) == b"again"


def test_cancelling_the_completion_cancels_the_stream(two: Two) -> None:
    receiver, sender = two.expect(), two.open()
    two.send(sender, range(1))
    receiver.completion.cancel()
    fails(receiver, CancelledTransferError)
    two.require_free()


def test_cancel_before_the_sender_comes(two: Two) -> None:
    two.expect().cancel("changed its mind")
    sender = two.open()
    with pytest.raises(CancelledTransferError):
        two.send(sender)
        sender.finish(b"", deadline_s=WAIT_S)
    two.require_free()


def test_deadlines_of_either_side(two: Two) -> None:
    fails(two.expect("early", deadline_s=0.0), TransferTimeoutError)
    receiver, sender = two.expect("r", deadline_s=0.2), two.open("r")
    two.send(sender, range(1))
    fails(receiver, TransferTimeoutError)
    two.require_free()
    receiver, sender = two.expect("s"), two.open("s", deadline_s=0.2)
    two.send(sender, range(1))
    fails(receiver, TransferTimeoutError)
    with pytest.raises(TransferTimeoutError):
        sender.finish(b"", deadline_s=WAIT_S)
    two.require_free()


def test_finish_gives_up_at_its_deadline(two: Two) -> None:
    two.here.faults = Faults(drop=1.0)
    receiver, sender = two.expect(), two.open()
    two.send(sender)
    with pytest.raises(TransferTimeoutError):
        sender.finish(b"", deadline_s=0.05)
    assert two.outbox.counts().quarantined == SHARE  # the receiver may be reading, for all we know
    two.here.faults = Faults()
    two.endpoint.close()
    two.require_free()
    receiver.cancel("")


def test_another_layout_or_count_is_refused_on_both_sides(two: Two) -> None:
    other = replace(LAYOUT, num_layers=LAYERS + 1)
    for layout, count in ((other, BLOCKS), (LAYOUT, BLOCKS - 1)):
        receiver = two.expect()
        sender = two.sending.open(two.endpoint, "r", two.outbox, layout, count, deadline_s=WAIT_S)
        fails(receiver, LayoutMismatchError)
        sender_fails(sender, LayoutMismatchError)
    two.require_free()


def test_closing_a_hub_ends_its_streams_on_both_sides(two: Two) -> None:
    receiver, sender = two.expect(), two.open()
    two.send(sender, range(2))
    two.receiving.close()
    two.receiving.close()
    assert receiver.completion.done()
    fails(receiver, ClosedError)
    with pytest.raises(ClosedError):
        two.expect("later")
    two.require_free()
    two.sending.close()
    with pytest.raises(ClosedError):
        two.open("later")
