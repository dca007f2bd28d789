"""Look-ups go by the ring before a change until the shards were told."""

from kvpool.block import NodeId
from kvpool.client.settling import Settling

A, B, C, D = (NodeId(name) for name in "abcd")
SETTLE_S = 3.0


def test_the_first_ones_count_at_once() -> None:
    assert Settling(SETTLE_S).take({A, B}, [A, B], 10.0) == [A, B]


def test_who_joined_counts_a_little_later() -> None:
    ring = Settling(SETTLE_S)
    ring.take({A}, [A], 10.0)
    assert ring.take({A, B}, [B], 11.0) == [A]
    assert ring.take({A, B}, [], 13.9) == [A]
    assert ring.take({A, B}, [], 14.0) == [A, B]


def test_who_left_counts_a_little_longer() -> None:
    ring = Settling(SETTLE_S)
    ring.take({A, B, C}, [A, B, C], 10.0)
    assert ring.take({A, B}, [], 11.0) == [A, B, C]
    assert ring.take({A, B}, [], 13.9) == [A, B, C]
    assert ring.take({A, B}, [], 14.0) == [A, B]


def test_who_left_before_it_counted_never_did() -> None:
    ring = Settling(SETTLE_S)
    ring.take({A}, [A], 10.0)
    ring.take({A, B}, [B], 11.0)
    assert ring.take({A}, [], 12.0) == [A]


def test_who_comes_back_is_new() -> None:
    ring = Settling(SETTLE_S)
    ring.take({A, B}, [A, B], 10.0)
    ring.take({A}, [], 11.0)
    assert ring.take({A, B}, [B], 12.0) == [A]
    assert ring.take({A, B}, [], 15.0) == [A, B]


def test_where_all_are_new_nobody_counts_yet() -> None:
    ring = Settling(SETTLE_S)
    ring.take({A, B}, [A, B], 10.0)
    assert ring.take({C, D}, [C, D], 11.0) == []
    assert ring.take({C, D}, [], 14.0) == [C, D]
