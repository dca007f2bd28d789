"""Blocks in pieces: what is put together is whole and verified, whatever became of the pieces."""

from collections.abc import Callable, Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvpool.block import BlockLayout
from kvpool.client import protocol
from kvpool.client.streams import cut, join
from kvpool.errors import CorruptionError
from kvpool.memory import copy_blocks
from kvpool.testing.blocks import Payload, payload, view_of

LAYOUT = BlockLayout(num_layers=2, kv_heads=2, block_tokens=16, k_dim=8, v_dim=8)
PIECE_BYTES = LAYOUT.block_bytes - 96  # a block is two pieces
BLOCKS = 3
SOURCE = payload(LAYOUT, BLOCKS, seed=1)
Pieces = list[protocol.Payload]


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "PAYLOAD_BYTES_MAX", PIECE_BYTES)
        yield


def _pieces() -> Pieces:
    return list(cut(view_of(LAYOUT, SOURCE)))


def _joined(pieces: Pieces) -> tuple[int, Payload]:
    found = np.zeros_like(SOURCE)
    return join(pieces, view_of(LAYOUT, found)), found


def _flip(data: bytes, at: int) -> bytes:
    at %= len(data)
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _flip_payload(pieces: Pieces, at: int) -> None:
    piece = pieces[at % len(pieces)]
    piece.payload = _flip(piece.payload, at)


def _flip_crcs(pieces: Pieces, at: int) -> None:
    piece = pieces[at % len(pieces)]
    piece.crcs = _flip(piece.crcs, at) if piece.crcs else bytes(4)


def _lose_crcs(pieces: Pieces, at: int) -> None:
    pieces[at % len(pieces)].crcs = b""


def _lose(pieces: Pieces, at: int) -> None:
    del pieces[at % len(pieces)]


def _repeat(pieces: Pieces, at: int) -> None:
    pieces.insert(at % len(pieces), pieces[at % len(pieces)])


def _swap(pieces: Pieces, at: int) -> None:
    at %= len(pieces)
    pieces[at], pieces[at - 1] = pieces[at - 1], pieces[at]


def _shorten(pieces: Pieces, at: int) -> None:
    piece = pieces[at % len(pieces)]
    piece.payload = piece.payload[: at % len(piece.payload)]


def _lengthen(pieces: Pieces, at: int) -> None:
    pieces[at % len(pieces)].payload += b"x"


def _move(pieces: Pieces, at: int) -> None:
    pieces[at % len(pieces)].offset += 1


def _rename(pieces: Pieces, at: int) -> None:
    pieces[at % len(pieces)].block += 1


FAULTS: list[Callable[[Pieces, int], None]] = [
    *(_flip_payload, _flip_crcs, _lose_crcs, _lose, _repeat, _swap),
    *(_shorten, _lengthen, _move, _rename),
]


def test_pieces_make_the_blocks_again() -> None:
    pieces = _pieces()
    assert len(pieces) == 2 * BLOCKS
    assert max(len(piece.payload) for piece in pieces) == PIECE_BYTES
    count, found = _joined(pieces)
    assert count == BLOCKS
    assert np.array_equal(found, SOURCE)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
@given(at=st.integers(0, 1 << 20))
def test_whatever_becomes_of_a_piece_no_wrong_byte_counts(
    fault: Callable[[Pieces, int], None], at: int
) -> None:
    pieces = _pieces()
    fault(pieces, at)
    count, found = _joined(pieces)
    assert np.array_equal(found[:count], SOURCE[:count])
    if fault in (_flip_payload, _lose, _shorten, _lengthen, _move, _rename):
        assert count < BLOCKS


def test_a_block_that_does_not_sum_to_what_was_told_is_not_cut() -> None:
    """The sums are those that the block was stored with: they are never taken anew."""
    known = copy_blocks(view_of(LAYOUT, np.zeros_like(SOURCE)), view_of(LAYOUT, SOURCE))
    damaged = SOURCE.copy()
    damaged[1, -1] ^= 1
    sent: Pieces = []
    with pytest.raises(CorruptionError):
        for piece in cut(view_of(LAYOUT, damaged), crcs=known):
            sent.append(piece)
    assert {piece.block for piece in sent} == {0}
    assert _joined(sent)[0] == 1
