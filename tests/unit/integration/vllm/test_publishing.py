"""The ledger of KV events: what is claimed was stored whole, and every claim ends."""

from types import SimpleNamespace

import pytest

from kvpool.integration.vllm import publishing
from kvpool.integration.vllm.publishing import Claim, Ended, Ledger, StoredPart
from kvpool.integration.vllm.shape import BlockRun, Group
from tests.unit.integration.vllm.scene import FULL, SIZE, hashes, part, request, shape

TWO = Group(number=0, layers=("a", "b"), window_tokens=None, parts=(part(0), part(0, head=1)))


def asked(tokens: int) -> SimpleNamespace:
    return request("r", tokens, all_token_ids=list(range(tokens)), session_id="s")


def ledger_of(*groups: Group) -> Ledger:
    return Ledger(shape(*groups), lambda _, begin, end: (begin, end))


def run(begin: int, end: int) -> BlockRun:
    names = hashes(end)
    parent = names[begin - 1] if begin else None
    return BlockRun(0, tuple(names[begin:]), tuple(range(begin, end)), parent, begin)


def stored(count: int, head: int = 0, begin: int = 0) -> list[StoredPart]:
    return [StoredPart(0, part(0, head), name) for name in hashes(count)[begin:]]


def test_a_block_is_claimed_when_every_part_is_stored() -> None:
    ledger = ledger_of(TWO)
    ledger.ordered(asked(4 * SIZE), run(1, 3))
    ledger.stored(stored(3))
    assert not ledger.take()
    ledger.stored(stored(3, head=1))
    names = hashes(3)
    assert ledger.take() == [
        Claim(0, names[1], names[0], tuple(range(SIZE, 2 * SIZE)), (SIZE, 2 * SIZE), "s"),
        Claim(0, names[2], names[1], tuple(range(2 * SIZE, 3 * SIZE)), (2 * SIZE, 3 * SIZE), "s"),
    ]
    # Told again by another request: no news. What nobody ordered is not claimed.
    ledger.ordered(asked(4 * SIZE), run(1, 3))
    ledger.stored(stored(3) + stored(3, head=1))
    ledger.stored(stored(4, begin=3))
    assert not ledger.take()
    assert len(ledger) == 2


def test_a_lost_block_is_no_claim_any_more() -> None:
    ledger = ledger_of(FULL)
    ledger.ordered(asked(3 * SIZE), run(0, 3))
    ledger.stored(stored(3))
    ledger.take()
    doubts = ledger.due(100.0)
    assert [doubt.block for doubt in doubts] == hashes(3)
    assert ledger.due(100.1) == doubts  # nobody had time to look
    ledger.looked_at(doubts, 100.1)
    assert not ledger.due(100.5)  # not so soon again
    ledger.missing(doubts[1:2])
    ledger.missing(doubts[1:2])
    assert ledger.take() == [Ended(0, hashes(3)[1])]
    # Stored anew since it was looked at: the doubt is not about this claim.
    ledger.ordered(asked(3 * SIZE), run(0, 3))
    ledger.stored(stored(3))
    ledger.missing(doubts)
    assert ledger.take() == [
        Claim(0, hashes(3)[1], hashes(3)[0], tuple(range(SIZE, 2 * SIZE)), (SIZE, 2 * SIZE), "s")
    ]
    ledger.clear()
    assert {ended.block for ended in ledger.take()} == set(hashes(3))
    assert not ledger.due(200.0)


def test_claims_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "CLAIMS_MAX", 4)
    monkeypatch.setattr(publishing, "PENDING_MAX", 8)
    monkeypatch.setattr(publishing, "CHECK_CLAIMS", 3)
    ledger = ledger_of(FULL)
    ledger.ordered(asked(10 * SIZE), run(0, 10))
    assert len(ledger._pending) == 8
    ledger.stored(stored(10))
    news = ledger.take()
    claimed = [new.block for new in news if isinstance(new, Claim)]
    ended = [new.block for new in news if isinstance(new, Ended)]
    assert (claimed, ended) == (hashes(10)[2:], hashes(6)[2:])
    # All of them are looked at in turn.
    first = ledger.due(10.0)
    ledger.looked_at(first, 10.0)
    second = ledger.due(20.0)
    assert {doubt.block for doubt in (*first, *second)} == set(hashes(10)[6:])
    # Nobody got to two of them: they come before all others.
    ledger.looked_at(second, 20.0)
    ledger.put_first(second[1:])
    assert ledger.due(30.0)[:2] == second[1:]
