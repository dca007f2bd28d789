"""Writes as both sides see them: the window of parts, late and wrong answers, what a peer may ask for.

The test stands in for the endpoint: it hears what is said, and answers. The suite of transports has the
bytes.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from kvpool import completion
from kvpool.arena import Arena
from kvpool.block import new_incarnation
from kvpool.completion import Completion, CompletionSource
from kvpool.errors import (
    CancelledTransferError,
    CapacityError,
    ClosedError,
    CorruptionError,
    LeaseExpiredError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.memory import Span
from kvpool.testing.blocks import SMALL_LAYOUT
from kvpool.transfer.base import RemoteSlots
from kvpool.transfer.registered import Registered
from kvpool.transfer.write_wire import (
    PARTS_MAX,
    ROW,
    ROWS_MAX,
    Drop,
    Note,
    Part,
    Rows,
    Took,
    WriteMessage,
    error_in,
    rows_of,
    took,
)
from kvpool.transfer.writes import WRITES_MAX, Takes, Writes

WAIT_S = 20.0
SLOTS = 4


class Line:
    """An endpoint whose thread is the test's: what is posted runs at once."""

    def __init__(self) -> None:
        self.said: list[WriteMessage] = []
        self.later: list[Callable[[], None]] = []
        self.pulls: list[CompletionSource[int]] = []
        self.asked: list[tuple[Sequence[tuple[Span, RemoteSlots, int]], float]] = []
        self.notes: list[bytes] = []
        self.full = False

    def say_write(self, message: WriteMessage) -> None:
        self.said.append(message)

    def post(self, call: Callable[[], None]) -> bool:
        call()
        return True

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self.later.append(call)

    def read_spans(
        self, pairs: Sequence[tuple[Span, RemoteSlots, int]], deadline_s: float
    ) -> Completion[int]:
        self.asked.append((pairs, deadline_s))
        self.pulls.append(CompletionSource())
        return self.pulls[-1].completion

    def take_note(self, payload: bytes) -> None:
        if self.full:
            raise CapacityError("full")
        self.notes.append(payload)


def rows(count: int, *, slot: int = 0, generation: int = 1) -> Rows:
    """Return spans of one byte, side by side in one slot."""
    table = np.zeros(count, dtype=ROW)
    table["slot"], table["generation"], table["from_generation"] = slot, generation, 1
    table["offset"] = np.arange(count)
    table["size"] = 1
    return table


# ---- the writer ----------------------------------------------------------------------------------


def test_only_so_many_parts_are_open_at_once() -> None:
    line = Line()
    writes = Writes(line)
    count = ROWS_MAX * (PARTS_MAX + 2) + 1
    write = writes.submit(rows(count), b"note", WAIT_S)
    for done in range(PARTS_MAX + 3):
        assert len(line.said) == min(PARTS_MAX + done, PARTS_MAX + 3)
        writes.take(took(0))
    sent = np.concatenate([rows_of(part) for part in line.said if isinstance(part, Part)])
    assert sent["offset"].tolist() == list(range(count))
    # The note comes when every part has, and the end when the note has.
    assert line.said[-1] == Note(0, b"note")
    assert not write.done()
    writes.take(took(0))
    assert write.result() == count


def test_an_answer_that_nobody_asked_for_is_refused() -> None:
    writes = Writes(Line())
    with pytest.raises(CorruptionError):
        writes.take(took(0))
    writes.submit(rows(1), b"", WAIT_S)
    writes.submit(rows(1), b"", WAIT_S)
    writes.take(took(0))
    writes.take(took(1))
    with pytest.raises(CorruptionError):
        writes.take(took(1))


def test_an_error_ends_a_write_after_the_parts_that_are_open() -> None:
    line = Line()
    writes = Writes(line)
    write = writes.submit(rows(ROWS_MAX * 100), b"never", WAIT_S)
    writes.take(took(0, LeaseExpiredError("gone")))
    for _ in range(PARTS_MAX - 1):
        assert not write.done()
        writes.take(took(0))
    with pytest.raises(LeaseExpiredError, match="gone"):
        write.result()
    assert len(line.said) == PARTS_MAX


def test_a_cancel_ends_a_write_when_the_peer_has_stopped() -> None:
    line = Line()
    writes = Writes(line)
    write = writes.submit(rows(1), b"", WAIT_S)
    write.cancel()
    write.cancel()
    assert line.said[1:] == [Drop(0)]
    assert not write.done()
    writes.take(took(0, CancelledTransferError("dropped")))
    with pytest.raises(CancelledTransferError):
        write.result()


def test_a_passed_deadline_ends_a_write_whatever_the_peer_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = Line()
    writes = Writes(line)
    late = [writes.submit(rows(ROWS_MAX * PARTS_MAX), b"", WAIT_S) for _ in range(2)]
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 2 * WAIT_S)
    monkeypatch.setattr(completion, "time", later)
    line.later[0]()
    for write in late:
        with pytest.raises(TransferTimeoutError):
            write.result()
    assert line.said[PARTS_MAX:] == [Drop(0)]  # the second one was never asked for
    # The parts of the first are open still: nothing more is asked of a peer that does not answer.
    after = writes.submit(rows(1), b"", WAIT_S)
    assert len(line.said) == PARTS_MAX + 1
    for _ in range(PARTS_MAX):
        writes.take(took(0))
    writes.take(took(2))
    assert after.result() == 1


def test_each_write_ends_at_its_own_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line()
    writes = Writes(line)
    soon, late = (writes.submit(rows(1), b"", seconds) for seconds in (WAIT_S, 3 * WAIT_S))
    for waited, ended in ((2, [True, False]), (4, [True, True])):
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + waited * WAIT_S)  # noqa: B023
        monkeypatch.setattr(completion, "time", later)
        line.later.pop()()
        assert [soon.done(), late.done()] == ended
    with pytest.raises(TransferTimeoutError):
        late.result()


def test_any_number_of_writes_come_one_after_another() -> None:
    line = Line()
    writes = Writes(line)
    for number in range(WRITES_MAX + 1):
        write = writes.submit(rows(1), b"", WAIT_S)
        writes.take(took(number))
        assert write.result() == 1


def test_a_queue_that_is_full_and_an_endpoint_that_has_ended_refuse() -> None:
    line = Line()
    writes = Writes(line)
    queued = [writes.submit(rows(1), b"", WAIT_S) for _ in range(WRITES_MAX)]
    with pytest.raises(CapacityError):
        writes.submit(rows(1), b"", WAIT_S)
    writes.refuse(ClosedError("closed"))
    assert all(write.done() for write in queued)
    with pytest.raises(ClosedError):
        writes.submit(rows(1), b"", WAIT_S)


def test_an_error_of_an_unknown_kind_is_an_end() -> None:
    assert isinstance(error_in(Took(0, "NoSuchError", "x")), CancelledTransferError)
    assert error_in(Took(0, "", "")) is None


# ---- the owner -----------------------------------------------------------------------------------


@pytest.fixture
def arena() -> Iterator[Arena]:
    with_slots = Arena(SMALL_LAYOUT, SLOTS, new_incarnation())
    yield with_slots
    with_slots.close()


@pytest.fixture
def ours(arena: Arena) -> Registered:
    registered = Registered()
    registered.add(arena, True)
    registered.add(arena, False)
    return registered


def part(table: Rows, write: int = 0) -> Part:
    return Part(write, 1000, table.tobytes())


def test_a_part_holds_its_slot_until_its_pull_has_ended(arena: Arena, ours: Registered) -> None:
    line, slot = Line(), arena.reserve()
    takes = Takes(line, ours)
    takes.part(part(rows(3, slot=slot.index, generation=slot.generation)))
    arena.release(slot)  # its holder gives up
    counts = arena.counts()
    assert (counts.grants, counts.quarantined, counts.free) == (1, 1, SLOTS - 1)
    assert line.said == []
    line.pulls[0].finish(3)
    assert line.said == [took(0)]
    counts = arena.counts()
    assert (counts.grants, counts.quarantined, counts.free) == (0, 0, SLOTS)
    pairs, deadline_s = line.asked[0]
    assert deadline_s == 1.0
    assert [span.size for span, _, _ in pairs] == [1, 1, 1]


def test_two_writes_of_a_slot_are_never_under_way_at_once(arena: Arena, ours: Registered) -> None:
    line, slot = Line(), arena.reserve()
    table = rows(1, slot=slot.index, generation=slot.generation)
    ones, others = Takes(line, ours), Takes(line, ours)
    ones.part(part(table, 0))
    ones.part(part(table, 0))  # two parts of one write may share it
    for takes, write in ((ones, 1), (others, 0)):
        takes.part(part(table, write))
        answer = line.said.pop()
        assert isinstance(answer, Took)
        assert isinstance(error_in(answer), CapacityError)
    line.pulls[0].finish(1)
    others.part(part(table, 0))
    assert isinstance(line.said.pop(), Took)
    line.pulls[1].fail(LeaseExpiredError("the source is gone"))
    others.part(part(table, 0))
    assert len(line.pulls) == 3


def test_a_peer_may_have_only_so_many_parts_open(arena: Arena, ours: Registered) -> None:
    takes, slot = Takes(Line(), ours), arena.reserve()
    table = rows(1, slot=slot.index, generation=slot.generation)
    for _ in range(PARTS_MAX):
        takes.part(part(table))
    with pytest.raises(CorruptionError):
        takes.part(part(table))


def test_a_drop_cancels_the_pulls_of_that_write_alone(arena: Arena, ours: Registered) -> None:
    line, slots = Line(), arena.reserve_some(2)
    takes = Takes(line, ours)
    for number, slot in enumerate(slots):
        takes.part(part(rows(1, slot=slot.index, generation=slot.generation), number))
    takes.drop(Drop(1))
    takes.drop(Drop(77))
    assert [pull.cancel_requested for pull in line.pulls] == [False, True]


def test_a_note_that_finds_no_room_is_an_error_of_its_write(ours: Registered) -> None:
    line = Line()
    takes = Takes(line, ours)
    takes.note(Note(0, b"one"))
    line.full = True
    takes.note(Note(1, b"two"))
    assert line.notes == [b"one"]
    assert line.said[0] == took(0)
    assert isinstance(line.said[1], Took)
    assert isinstance(error_in(line.said[1]), CapacityError)


def test_parts_with_anything_in_them_achieve_a_typed_error(arena: Arena, ours: Registered) -> None:
    """Any field may be anything: what does not name reserved slots is refused, and nothing is held."""
    slots = arena.reserve_some(SLOTS)
    line = Line()
    takes = Takes(line, ours)
    random = np.random.default_rng(40)
    numbers = [0, 1, 2, SLOTS, SMALL_LAYOUT.block_bytes, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
    lives = {(slot.index, slot.generation) for slot in slots}
    for _ in range(2000):
        table = np.zeros(int(random.integers(1, 4)), dtype=ROW)
        for name in ROW.names or ():
            mask = 2**32 - 1 if ROW[name].itemsize == 4 else 2**64 - 1
            table[name] = [numbers[at] & mask for at in random.integers(0, 4, len(table))]
            if random.random() < 0.2:
                table[name][-1] = numbers[int(random.integers(len(numbers)))] & mask
        pulls = len(line.pulls)
        takes.part(part(table))
        if len(line.pulls) == pulls:
            answer = line.said.pop()
            assert isinstance(answer, Took)
            assert isinstance(error_in(answer), UsageError | LeaseExpiredError | CapacityError)
        else:  # what it names is there, all of it
            for row in table:
                assert (row["slot"], row["generation"]) in lives
                assert row["region"] == 0
                assert 0 < row["size"] <= SMALL_LAYOUT.block_bytes - row["offset"]
            line.pulls[-1].finish(0)
        assert arena.counts().grants == 0
    with pytest.raises(CorruptionError):
        takes.part(Part(0, 0, bytes(57)))
