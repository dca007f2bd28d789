"""Names of parts, windows, and runs of blocks."""

import pytest

from kvpool.block import HASH_BYTES
from kvpool.errors import ConfigError
from kvpool.integration.vllm.options import read_options
from kvpool.integration.vllm.shape import block_runs, part_chain
from tests.unit.integration.vllm.scene import FULL, NAMESPACE, SIZE, WINDOW, hashes, part


def test_each_part_of_a_block_has_a_name_of_its_own() -> None:
    names = hashes(3)
    chains = [
        part_chain(NAMESPACE, one, names).hashes for one in (part(0), part(1), part(0, head=1))
    ]
    cut = [
        chain[at : at + HASH_BYTES] for chain in chains for at in range(0, len(chain), HASH_BYTES)
    ]
    assert len(set(cut)) == 9
    assert not set(cut) & set(names)


def test_the_first_block_that_a_window_needs() -> None:
    assert [FULL.first_needed(blocks, SIZE) for blocks in (0, 1, 9)] == [0, 0, 0]
    # 3 blocks are 48 tokens: token 48 sees 29 to 48, so block 1 on.
    assert [WINDOW.first_needed(blocks, SIZE) for blocks in (0, 1, 2, 3, 4)] == [0, 0, 0, 1, 2]


def test_runs_are_cut_at_null_blocks() -> None:
    names = hashes(6)
    runs = block_runs(1, names, [0, 5, 6, 0, 8, 9], 0, 6)
    assert [run.block_ids for run in runs] == [(5, 6), (8, 9)]
    assert [run.parent for run in runs] == [names[0], names[3]]
    assert [run.hashes for run in runs] == [tuple(names[1:3]), tuple(names[4:6])]
    assert block_runs(1, names, [7, 0], 0, 1)[0].parent is None
    assert not block_runs(1, names, [0, 0], 0, 2)
    assert not block_runs(1, names, [4, 4], 1, 1)


def test_ranks_with_the_same_heads_store_once() -> None:
    twice = type(FULL)(
        number=0, layers=("a",), window_tokens=None, parts=(part(0), part(0), part(0, head=1))
    )
    assert [twice.writes(rank) for rank in range(3)] == [True, False, True]
    assert twice.own_parts() == (part(0), part(0, head=1))


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"dram": "1GiB", "server": "/x"},
        {"dram": "lots"},
        {"dram": "1GiB", "drum": 1},
        {"server": "/x", "ssd": "/y", "ssd_bytes": "1GiB"},
        {"dram": "1GiB", "ssd": "/y"},
        {"dram": "1GiB", "token_file": "/t"},
        {"server": "/x", "ca_file": "/c"},
        {"dram": "1GiB", "load_timeout_s": 0},
        {"dram": "1GiB", "load_timeout_s": "soon"},
        {"dram": "1GiB", "load_timeout_s": float("inf")},
        {"dram": "1GiB", "load_timeout_s": True},
        {"dram": "1GiB", "salt": None},
        {"dram": "1GiB", "salt": 7},
        {"server": None},
        {"dram": True},
        {"dram": "1GiB", "ssd": "", "ssd_bytes": "1GiB"},
        {"server": "10.0.0.5:7420", "token_file": ""},
    ],
)
def test_wrong_settings_are_refused(extra: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        read_options(extra)


def test_sizes_are_read() -> None:
    options = read_options({"dram": "1GiB", "ssd": "/y", "ssd_bytes": "2GiB", "staging": 4096})
    assert (options.dram_bytes, options.ssd_bytes, options.staging_bytes) == (
        1 << 30,
        2 << 30,
        4096,
    )


@pytest.mark.parametrize(
    ("extra", "near"),
    [
        ({"dram": "1GiB"}, True),
        ({"server": "/run/user/1000/kvpool"}, True),
        ({"server": "127.0.0.1:7420"}, False),  # it may be another host's, behind a tunnel
    ],
)
def test_what_is_named_by_an_address_may_be_far(extra: dict[str, object], near: bool) -> None:
    assert read_options(extra).near is near
