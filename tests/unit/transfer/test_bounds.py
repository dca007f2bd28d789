"""Numbers that a caller may not name, and those that it may."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from kvpool.block import BlockLayout
from kvpool.errors import UsageError
from kvpool.memory import BlockView
from kvpool.transfer.bounds import numbers, require_apart, require_puts, require_room

LAYOUT = BlockLayout(num_layers=2, kv_heads=3, block_tokens=16, k_dim=2, v_dim=2)
UNLIKE = replace(LAYOUT, v_dim=1)
K_ONLY = replace(LAYOUT, v_dim=0)


def view(layout: BlockLayout, strides: tuple[int, ...], ids: list[int]) -> BlockView:
    block, layer, head, kv, k_token, v_token = strides
    return BlockView(
        layout=layout,
        base=1 << 20,
        block_stride=block,
        layer_stride=layer,
        head_stride=head,
        kv_stride=kv,
        k_token_stride=k_token,
        v_token_stride=v_token,
        block_ids=np.array(ids, dtype=np.uint64),
    )


def writes_twice(of: BlockView) -> bool:
    """Walk every byte, as C does."""
    layout, seen = of.layout, set[int]()
    for block in of.block_ids:
        for layer, head, token, kv in np.ndindex(layout.num_layers, layout.kv_heads, 16, 2):
            size = layout.v_row_bytes if kv else layout.k_row_bytes
            begin = (
                int(block) * of.block_stride
                + layer * of.layer_stride
                + head * of.head_stride
                + kv * of.kv_stride
                + token * (of.v_token_stride if kv else of.k_token_stride)
            )
            row = set(range(begin, begin + size))
            if row & seen:
                return True
            seen |= row
    return False


def allowed(of: BlockView) -> bool:
    try:
        require_room(of)
    except UsageError:
        return False
    return True


@pytest.mark.parametrize("order", list(permutations(range(5))))
def test_axes_in_any_order_are_allowed(order: tuple[int, ...]) -> None:
    counts = (6, LAYOUT.num_layers, LAYOUT.kv_heads, 2, LAYOUT.block_tokens)
    strides, extent = [0] * 5, LAYOUT.k_row_bytes
    for axis in order:
        strides[axis] = extent
        extent *= counts[axis]
    of = view(LAYOUT, (*strides, strides[4]), [5, 0, 3])
    assert allowed(of)
    assert not writes_twice(of)
    for axis in range(4):  # one byte less, and rows lie on one another
        less = [stride - (at == axis) for at, stride in enumerate(strides)]
        assert not allowed(view(LAYOUT, (*less, strides[4]), list(range(6))))


@pytest.mark.parametrize("layout", [LAYOUT, UNLIKE, K_ONLY])
def test_canonical_blocks_are_allowed(layout: BlockLayout) -> None:
    assert allowed(BlockView.canonical(layout, 4096, layout.block_bytes, [7, 1, 2]))
    short = BlockView.canonical(layout, 4096, layout.block_bytes - 1, [7, 1, 2])
    assert not allowed(short)
    assert allowed(replace(short, block_ids=short.block_ids[:1]))  # one block has no neighbour


def test_nothing_that_is_allowed_writes_a_byte_twice() -> None:
    random = np.random.default_rng(1)
    sizes = [0, 1, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 768, 1536]
    outcomes = {True: 0, False: 0}
    for _ in range(3000):
        layout = (LAYOUT, UNLIKE, K_ONLY)[int(random.integers(3))]
        strides = tuple(int(random.choice(sizes)) for _ in range(6))
        if random.integers(2):
            strides = (*strides[:5], strides[4])
        ids = [int(each) for each in random.permutation(4)[: random.integers(1, 4)]]
        of = view(layout, strides, ids)
        outcomes[allowed(of)] += 1
        if allowed(of):
            assert not writes_twice(of), of
    assert min(outcomes.values()) > 5  # both happen, or this shows nothing


def test_numbers_are_whole() -> None:
    assert numbers([0, 2**64 - 1], "x").tolist() == [0, 2**64 - 1]
    for wrong in (-1, 2**64, 0.0, "1", None):
        with pytest.raises(UsageError, match="x: "):
            numbers([1, wrong], "x")  # type: ignore[list-item]


def test_spans_lie_apart_in_any_order() -> None:
    begins = np.array([30, 10, 20], dtype=np.uint64)
    require_apart(begins, np.array([5, 10, 10], dtype=np.uint64), "x")
    for sizes in ([5, 11, 10], [5, 10, 11], [2**64 - 30, 1, 1]):
        with pytest.raises(UsageError, match="x: "):
            require_apart(begins, np.array(sizes, dtype=np.uint64), "x")


def test_the_wrong_put_of_a_batch_is_named() -> None:
    table = np.array([[4096, 8, 0], [8192, 8, 8], [4096, 8, 57]], dtype=np.uint64)
    require_puts(table[:2], 64)
    with pytest.raises(UsageError, match="span 2 of the batch, 8 bytes to 57"):
        require_puts(table, 64)


def test_a_fraction_is_no_stride_even_when_its_number_was_one() -> None:
    good = BlockView.canonical(LAYOUT, 4096, LAYOUT.block_bytes, [0, 1])
    assert allowed(good)
    for name in ("base", "block_stride", "layer_stride", "head_stride", "kv_stride"):
        wrong = replace(good)
        object.__setattr__(wrong, name, float(getattr(good, name)))
        assert not allowed(wrong), name
