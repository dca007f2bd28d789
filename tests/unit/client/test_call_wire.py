"""Calls are cut and joined; what is none is refused, whatever it is."""

import random

import pytest

from kvpool.client.call_wire import (
    ANSWER_BYTES_MAX,
    CALL_BYTES_MAX,
    CALLS_MAX,
    Answer,
    Call,
    Cancel,
    Message,
    Parts,
    cut,
)
from kvpool.errors import CorruptionError
from kvpool.transfer.base import NOTIFICATION_BYTES_MAX

SIZES = (0, 1, 900, 1100, 4096, CALL_BYTES_MAX)


def call(size: int, number: int = 7) -> Call:
    return Call(number, "/kvpool.v1.Pool/Match", 0.5, random.Random(size).randbytes(size))


def joined(parts: Parts, notifications: list[bytes]) -> list[Message]:
    return [found for each in notifications if (found := parts.take(each)) is not None]


@pytest.mark.parametrize("size", SIZES)
def test_a_message_comes_as_it_was_cut(size: int) -> None:
    for message in (call(size), Answer(7, "", bytes(size)), Cancel(3)):
        notifications = cut(7, message)
        assert all(0 < len(each) <= NOTIFICATION_BYTES_MAX for each in notifications)
        assert joined(Parts(), notifications) == [message]


def test_an_answer_may_be_longer_than_a_call() -> None:
    longest = Answer(7, "", random.Random("answer").randbytes(ANSWER_BYTES_MAX))
    assert joined(Parts(ANSWER_BYTES_MAX), cut(7, longest)) == [longest]
    with pytest.raises(CorruptionError):
        joined(Parts(), cut(7, longest))


def test_messages_of_many_threads_are_told_apart() -> None:
    messages = [call(size, number) for number, size in enumerate(SIZES)]
    cuts = [cut(message.number, message) for message in messages]
    mixed = [each[row] for row in range(max(map(len, cuts))) for each in cuts if row < len(each)]
    found = joined(Parts(), mixed)
    assert sorted(map(repr, found)) == sorted(map(repr, messages))


@pytest.mark.parametrize(
    "change", ["skipped", "twice", "last first", "longer", "shorter", "too many parts"]
)
def test_what_does_not_follow_is_refused(change: str) -> None:
    notifications = cut(7, call(4096))
    head, rest = notifications[0], notifications[1:]
    count = len(notifications)
    wrong = {
        "skipped": [head, *rest[1:]],
        "twice": [head, head],
        "last first": [rest[-1]],
        "longer": [head, b"\0" * 8],
        "shorter": [head[:3]],
        "too many parts": [head[:6] + (2**16 - 1).to_bytes(2, "little") + head[8:]],
    }[change]
    assert count > 3
    parts = Parts()
    with pytest.raises(CorruptionError):
        joined(parts, wrong)
    if change != "longer":  # that one is as if it had not come: its message goes on
        assert joined(parts, notifications) == [call(4096)]
    else:
        assert joined(parts, rest) == [call(4096)]


def test_parts_that_nothing_follows_make_room() -> None:
    parts = Parts()
    for number in range(10 * CALLS_MAX):
        assert parts.take(cut(number, call(4096, number))[0]) is None
    assert len(parts) <= CALLS_MAX


def test_noise_is_no_call() -> None:
    rng, parts = random.Random("noise"), Parts()
    whole = cut(7, call(900))[0]
    for _ in range(2000):
        changed = bytearray(whole)
        for _ in range(rng.randrange(1, 5)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        for notification in (bytes(changed), rng.randbytes(rng.randrange(1, 60))):
            try:
                parts.take(notification)
            except CorruptionError:
                continue
    assert joined(Parts(), [whole]) == [call(900)]


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_call_ends(timeout_s: float) -> None:
    endless = Call(7, "/kvpool.v1.Pool/Match", timeout_s, b"")
    with pytest.raises(CorruptionError):
        joined(Parts(), cut(7, endless))
