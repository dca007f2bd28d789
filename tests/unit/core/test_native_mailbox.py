"""mailbox.c: two sides against two queues."""

from collections import deque
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvpool._native import ffi, lib

if TYPE_CHECKING:
    from kvpool._native import CData

RECORDS, RECORD_BYTES = 4, 60
INCARNATIONS = (bytes([1]) * 16, bytes([2]) * 16)


def open_mailbox(incarnation: bytes, records: int = RECORDS) -> "CData":
    out = ffi.new("kvp_mailbox **")
    assert lib.kvp_mailbox_open(records, RECORD_BYTES, incarnation, out) == lib.KVP_OK
    return ffi.gc(out[0], lib.kvp_mailbox_close)


class MailboxMachine(RuleBasedStateMachine):
    """Each direction is a queue of at most RECORDS payloads."""

    sides = st.integers(0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.mailboxes = [open_mailbox(name) for name in INCARNATIONS]
        self.sent: list[deque[bytes]] = [deque(), deque()]
        for side in (0, 1):
            status = lib.kvp_mailbox_attach(
                self.mailboxes[side],
                lib.kvp_mailbox_fd(self.mailboxes[1 - side]),
                INCARNATIONS[1 - side],
            )
            assert status == lib.KVP_OK

    @rule(side=sides, payload=st.binary(max_size=RECORD_BYTES + 1))
    def push(self, side: int, payload: bytes) -> None:
        status = lib.kvp_mailbox_push(self.mailboxes[side], payload, len(payload))
        if not 0 < len(payload) <= RECORD_BYTES:
            assert status == lib.KVP_INVALID
        elif len(self.sent[side]) == RECORDS:
            assert status == lib.KVP_FULL
        else:
            assert status == lib.KVP_OK
            self.sent[side].append(payload)

    @rule(side=sides)
    def pop(self, side: int) -> None:
        payload, size = ffi.new("uint8_t[]", RECORD_BYTES), ffi.new("size_t *")
        status = lib.kvp_mailbox_pop(self.mailboxes[side], payload, size)
        if not self.sent[1 - side]:
            assert status == lib.KVP_MISS
        else:
            assert status == lib.KVP_OK
            assert bytes(ffi.buffer(payload, size[0])) == self.sent[1 - side].popleft()


TestMailbox = MailboxMachine.TestCase
TestMailbox.settings = settings(deadline=None)


def test_another_shape_or_run_is_refused() -> None:
    mailbox, larger = open_mailbox(INCARNATIONS[0]), open_mailbox(INCARNATIONS[1], 2 * RECORDS)
    fd = lib.kvp_mailbox_fd(larger)
    assert lib.kvp_mailbox_attach(mailbox, fd, INCARNATIONS[1]) == lib.KVP_CORRUPT
    peer = open_mailbox(INCARNATIONS[1])
    fd = lib.kvp_mailbox_fd(peer)
    assert lib.kvp_mailbox_attach(mailbox, fd, INCARNATIONS[0]) == lib.KVP_STALE
    assert lib.kvp_mailbox_attach(mailbox, fd, INCARNATIONS[1]) == lib.KVP_OK
    assert lib.kvp_mailbox_attach(mailbox, fd, INCARNATIONS[1]) == lib.KVP_BUSY
