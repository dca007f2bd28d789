"""An SSD tier after a crash: what was promised is there, nothing wrong is, and the counts add up.

A writer process is killed with SIGKILL at random points, or loses power as powercut.c plays it, and the
tier is opened again at once.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvpool.errors import KVPoolError
from kvpool.testing.blocks import SMALL_LAYOUT, key, view_of
from kvpool.tiers.ssd import SsdTier
from kvpool.tiers.ssd_format import slot_bytes
from tests.crash import powercut
from tests.crash.ssd_writer import CHAIN_MAX, ROOMY, SAID, TIGHT, block, chain_keys
from tests.tidy.mirror import ROOT

Count = Callable[[int, int], int]
Chain = tuple[int, int]  # the number of its first block, and how many

SMALL_ENOUGH = 300  # blocks that a run in a roomy store writes before it is killed at the latest


def run_until_killed(
    folder: Path, seed: int, slots: int, *words: str, environment: dict[str, str] | None = None
) -> list[Chain]:
    """Kill a writer after a random number of promises, and a moment; return those it made."""
    chance = random.Random(seed)
    promises = chance.randint(0, SMALL_ENOUGH // CHAIN_MAX)
    moment_us = chance.randint(0, 3000)
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.crash.ssd_writer", folder, str(seed), str(slots), *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
    )
    acks: list[Chain] = []
    with writer:
        assert writer.stdout is not None
        lines = iter(writer.stdout)
        assert next(lines) == b"go\n"
        for line in lines:
            acks.append(chain_of(line))
            if len(acks) >= promises:
                break
        signal.sigtimedwait([], moment_us / 1e6)  # somewhere in the next write
        writer.kill()
        acks += [chain_of(line) for line in lines if line.endswith(b"\n")]
    assert writer.returncode == -signal.SIGKILL
    return acks


def chain_of(line: bytes) -> Chain:
    word, first, count = line.split()
    assert word == b"ack"
    return int(first), int(count)


def check(folder: Path, slots: int, acks: list[Chain]) -> None:
    """Open what is left, and hold it against what was promised."""
    with SsdTier(folder, SMALL_LAYOUT, slots, threads=4, timeout_s=120) as tier:
        assert tier.recovery.source == "headers"
        promised = acks if slots == ROOMY else acks[-2:]
        for first, count in promised:
            keys = chain_keys(first, count)
            assert tier.durable(keys) == count, f"chain {first} of {count} blocks was promised"
            assert read(tier, first, count) == count
        last = max((first + count for first, count in acks), default=1)
        # All that may have been written; the writer may have been at the next chain or two.
        found = [n for n in range(1, last + 4 * CHAIN_MAX) if tier.match(key(n))]
        assert all(read(tier, number, 1) == 1 for number in found)
        stats = tier.stats()
        assert (stats.ready, stats.corruptions) == (len(found), 0)
        assert stats.free == slots - len(found)
        assert tier.ssd_stats().stale == tier.recovery.torn + tier.recovery.damaged
    segments = list(folder.glob("segment-*.kvp"))
    assert sum(path.stat().st_size for path in segments) == slots * slot_bytes(SMALL_LAYOUT)
    with SsdTier(folder, SMALL_LAYOUT, slots, threads=4, timeout_s=120) as tier:
        assert tier.recovery.source == "index"
        assert [n for n in range(1, last + 4 * CHAIN_MAX) if tier.match(key(n))] == found


def read(tier: SsdTier, first: int, count: int) -> int:
    """Read a chain; return how many blocks came, each of them right."""
    slots = tier.pin(chain_keys(first, count))
    out = np.zeros((len(slots), SMALL_LAYOUT.block_bytes), dtype=np.uint8)
    good, _ = tier.read(slots, view_of(SMALL_LAYOUT, out), deadline_s=120)
    tier.unpin(slots)
    for at in range(good):
        np.testing.assert_array_equal(out[at : at + 1], block(first + at))
    return good


@pytest.mark.parametrize("quarter", range(4))
def test_killed_at_any_point(quarter: int, tmp_path: Path, count: Count) -> None:
    for seed in range(quarter, count(4, 200), 4):
        folder, slots = tmp_path / str(seed), TIGHT if seed % 2 else ROOMY
        check(folder, slots, run_until_killed(folder, seed, slots))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return powercut.build(tmp_path_factory.mktemp("powercut"))


def lose_power(folder: Path, library: Path, seed: int, slots: int, **more: str) -> list[Chain]:
    """Run a writer until the power is cut; leave what the disk then holds in ``folder``."""
    before, log = folder.with_name(f"{folder.name}-before"), folder.with_name(f"{folder.name}-log")
    environment = {
        "LD_PRELOAD": str(library),
        "POWERCUT_LOG": str(log),
        "POWERCUT_FOLDER": str(before),
        **more,
    }
    acks = run_until_killed(before, seed, slots, environment=environment)
    powercut.leave(log.read_bytes(), before, folder, seed)
    log.unlink()
    return acks


@pytest.mark.parametrize("slots", [ROOMY, TIGHT])
def test_power_cut_at_many_points_of_one_run(
    slots: int, tmp_path: Path, library: Path, count: Count
) -> None:
    """What was promised up to a moment is there if the power goes at that moment.

    Most moments of a log lie within a write: a sync that is missing, or comes too late, is found here.
    """
    for seed in range(2000, 2000 + count(2, 20)):
        before, log = tmp_path / f"{seed}", tmp_path / f"{seed}-log"
        environment = {
            "LD_PRELOAD": str(library),
            "POWERCUT_LOG": str(log),
            "POWERCUT_FOLDER": str(before),
        }
        run_until_killed(before, seed, slots, environment=environment)
        raw = log.read_bytes()
        lines = powercut.said(raw, SAID)
        assert lines[0][1] == b"go\n"
        last = sum(1 for _ in powercut.records(raw))
        chance = random.Random(seed)
        for turn in range(count(8, 40)):
            until = chance.randint(lines[0][0] + 1, last)
            folder = tmp_path / f"{seed}-{turn}"
            powercut.leave(raw, before, folder, 100 * seed + turn, until=until)
            check(folder, slots, [chain_of(line) for place, line in lines[1:] if place < until])
            shutil.rmtree(folder)


@pytest.mark.parametrize("quarter", range(4))
def test_power_cut_at_any_point(quarter: int, tmp_path: Path, library: Path, count: Count) -> None:
    for seed in range(1000 + quarter, 1000 + count(4, 160), 4):
        folder, slots = tmp_path / str(seed), TIGHT if seed % 2 else ROOMY
        check(folder, slots, lose_power(folder, library, seed, slots))


def test_a_disk_that_lies_about_syncs_is_found_out(tmp_path: Path, library: Path) -> None:
    """A planted fault, so that the test above can fail: nothing that was written is durable."""
    losses = 0
    for seed in range(3):
        folder = tmp_path / str(seed)
        acks = lose_power(folder, library, seed + 7, ROOMY, POWERCUT_DEAF="1")
        try:
            check(folder, ROOMY, acks)
        except (AssertionError, KVPoolError):  # it may not open at all
            losses += 1
    assert losses == 3


def test_a_promise_before_its_time_is_found_out(tmp_path: Path) -> None:
    """A planted bug: the writer promises before it writes."""
    for seed in range(200):
        acks = run_until_killed(tmp_path / str(seed), seed, ROOMY, "lies")
        try:
            check(tmp_path / str(seed), ROOMY, acks)
        except AssertionError as error:
            assert "was promised" in str(error)
            return
    pytest.fail("no promise was broken in 200 runs")
