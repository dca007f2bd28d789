"""A store whose files were damaged while it was closed: never a wrong byte, and the rest is there."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.errors import CorruptionError, UnavailableError
from kvpool.testing.blocks import SMALL_LAYOUT, key, payload, view_of
from kvpool.tiers.ssd import SsdTier
from kvpool.tiers.ssd_format import slot_bytes
from kvpool.tiers.ssd_fsck import Report, check_store

Count = Callable[[int, int], int]

SLOTS = 6
SIZE = slot_bytes(SMALL_LAYOUT)
SEGMENT_SLOTS = 3
KEYS = b"".join(key(number) for number in range(SLOTS))
BLOCKS = payload(SMALL_LAYOUT, SLOTS, seed=3)


def open_tier(folder: Path) -> SsdTier:
    return SsdTier(
        folder,
        SMALL_LAYOUT,
        SLOTS,
        threads=2,
        segment_bytes=SEGMENT_SLOTS * SIZE,
        timeout_s=60,
    )


@pytest.fixture(params=["closed", "killed"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Make a full store of two segments: closed in order, or left by a process that was killed."""
    tier = open_tier(tmp_path)
    assert tier.write(KEYS, None, view_of(SMALL_LAYOUT, BLOCKS), deadline_s=60) == SLOTS
    if request.param == "closed":
        tier.close()
    else:
        copy = tmp_path / "killed"
        copy.mkdir()
        subprocess.run(
            ["cp", "-r", *map(str, sorted(tmp_path.glob("*.kvp"))), str(copy)], check=True
        )
        tier.close()
        return copy
    return tmp_path


def served(folder: Path) -> tuple[set[int], int]:
    """Open the store and read every block; return those that came, and the corruptions counted."""
    with open_tier(folder) as tier:
        found: set[int] = set()
        for number in range(SLOTS):
            slots = tier.pin(key(number))
            out = np.zeros((len(slots), SMALL_LAYOUT.block_bytes), dtype=np.uint8)
            good, _ = tier.read(slots, view_of(SMALL_LAYOUT, out), deadline_s=60)
            tier.unpin(slots)
            if good:
                np.testing.assert_array_equal(out[0], BLOCKS[number])
                found.add(number)
        recovery = tier.recovery
        counted = tier.stats().corruptions + recovery.damaged + recovery.torn
        assert tier.stats().ready == len(found)
        # The tier goes on: what is lost can be stored again.
        assert tier.write(KEYS, None, view_of(SMALL_LAYOUT, BLOCKS), deadline_s=60) == SLOTS
    return found, counted


def kinds(report: Report) -> set[str]:
    return {finding.kind for finding in report.findings}


def checked(folder: Path) -> Report:
    return check_store(folder, mend=False)


def patch(path: Path, at: int, payload_bytes: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(payload_bytes)


def flip(path: Path, bit: int) -> None:
    raw = path.read_bytes()[bit // 8]
    patch(path, bit // 8, bytes([raw ^ 1 << bit % 8]))


def segment(folder: Path, number: int) -> Path:
    return folder / f"segment-{number:04d}.kvp"


def test_an_undamaged_store(folder: Path) -> None:
    assert checked(folder).findings == ()
    assert served(folder) == (set(range(SLOTS)), 0)


def test_any_flipped_bit_is_a_miss(tmp_path: Path, count: Count) -> None:
    """With --soak every bit of a header, and 10,000 of a payload, under a tier that is open."""
    chance = random.Random(2)
    in_header, in_payload = range(8 * 4096), range(8 * 4096, 8 * (4096 + SMALL_LAYOUT.block_bytes))
    bits = chance.sample(in_header, count(40, len(in_header)))
    bits += chance.sample(in_payload, count(40, 10_000))
    with SsdTier(tmp_path, SMALL_LAYOUT, 1, threads=2, timeout_s=60) as tier:
        source = view_of(SMALL_LAYOUT, BLOCKS[:1])
        out = np.zeros((1, SMALL_LAYOUT.block_bytes), dtype=np.uint8)
        for number, bit in enumerate(bits):
            assert tier.write(key(0), None, source, deadline_s=60) == 1
            flip(segment(tmp_path, 0), bit)
            slots = tier.pin(key(0))
            assert tier.read(slots, view_of(SMALL_LAYOUT, out), deadline_s=60)[0] == 0, bit
            tier.unpin(slots)
            assert (tier.match(key(0)), tier.stats().corruptions) == (0, number + 1), bit


def test_a_flipped_bit_costs_its_block(folder: Path, count: Count) -> None:
    """A store that was damaged while it was closed: fsck says so, and opening loses that block."""
    chance = random.Random(1)
    used = 4096 + SMALL_LAYOUT.block_bytes
    for _ in range(count(6, 2000)):
        slot = chance.randrange(SEGMENT_SLOTS)
        bit = 8 * slot * SIZE + chance.randrange(8 * used)
        flip(segment(folder, 0), bit)
        report = checked(folder)
        assert len(report.findings) in (1, 2)  # the index may name it, too
        assert kinds(report) <= {"header", "payload", "version", "index"}
        found, counted = served(folder)
        assert (found, counted) == (set(range(SLOTS)) - {slot}, 1)
        assert checked(folder).findings == ()


@pytest.mark.parametrize(
    "at", [slot * SIZE + inside for slot in range(3) for inside in (0, 100, 5000)]
)
def test_a_file_cut_short(folder: Path, at: int) -> None:
    os.truncate(segment(folder, 0), at)
    assert "segment" in kinds(checked(folder))
    found, _ = served(folder)
    assert found == set(range(at // SIZE)) | {3, 4, 5}


def test_a_longer_file(folder: Path) -> None:
    with segment(folder, 1).open("ab") as file:
        file.write(b"more" * 5000)
    assert kinds(checked(folder)) == {"segment"}
    assert served(folder)[0] == set(range(SLOTS))
    assert segment(folder, 1).stat().st_size == SEGMENT_SLOTS * SIZE


def test_a_lost_file(folder: Path) -> None:
    segment(folder, 1).unlink()
    assert {"segment", "header"} <= kinds(checked(folder))
    assert served(folder)[0] == {0, 1, 2}


@pytest.mark.parametrize("at", [0, 4096])
def test_zeroed_pages(folder: Path, at: int) -> None:
    patch(segment(folder, 0), SIZE + at, bytes(4096))
    report = checked(folder)
    assert kinds(report) <= {"index", "payload"}
    assert bool(report.findings) == (at > 0 or report.clean)
    found, counted = served(folder)
    assert found == {0, 2, 3, 4, 5}
    assert counted == int(
        at > 0 or report.clean
    )  # without an index, nobody knows of a block that is no more


def test_swapped_files(folder: Path) -> None:
    first, second = segment(folder, 0).read_bytes(), segment(folder, 1).read_bytes()
    segment(folder, 0).write_bytes(second)
    segment(folder, 1).write_bytes(first)
    assert "other" in kinds(checked(folder))
    assert served(folder) == (set(), SLOTS)


def test_swapped_slots(folder: Path) -> None:
    raw = segment(folder, 0).read_bytes()
    patch(segment(folder, 0), 0, raw[SIZE : 2 * SIZE] + raw[:SIZE])
    assert served(folder) == ({2, 3, 4, 5}, 2)


def test_slots_of_another_store(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    with open_tier(other) as tier:
        blocks = payload(SMALL_LAYOUT, SLOTS, seed=99)
        tier.write(KEYS, None, view_of(SMALL_LAYOUT, blocks), deadline_s=60)
    segment(folder, 0).write_bytes(segment(other, 0).read_bytes())
    assert served(folder) == ({3, 4, 5}, 3)


def test_an_older_file_put_back(folder: Path) -> None:
    """Slots of an earlier life, whole, under the names that they had then."""
    older = segment(folder, 0).read_bytes()
    with open_tier(folder) as tier:
        fresh = b"".join(key(100 + number) for number in range(SLOTS))
        blocks = payload(SMALL_LAYOUT, SLOTS, seed=50)
        assert tier.write(fresh, None, view_of(SMALL_LAYOUT, blocks), deadline_s=60) == SLOTS
    segment(folder, 0).write_bytes(older)
    with open_tier(folder) as tier:
        slots = tier.pin(fresh)
        out = np.zeros((len(slots), SMALL_LAYOUT.block_bytes), dtype=np.uint8)
        good, _ = tier.read(slots, view_of(SMALL_LAYOUT, out), deadline_s=60)
        np.testing.assert_array_equal(out[:good], blocks[:good])
        assert good < SLOTS


def damage_index(folder: Path, chance: random.Random) -> Iterator[str]:
    """Damage the index's file in one way after another."""
    path = folder / "index" / "data.mdb"
    whole = path.read_bytes()
    for _ in range(5):
        flip(path, chance.randrange(8 * len(whole)))
        yield "a bit"
        path.write_bytes(whole)
    for size in (0, 100, len(whole) // 2, len(whole) - 4096):
        os.truncate(path, size)
        yield f"cut to {size}"
        path.write_bytes(whole)
    patch(path, 2 * 4096, os.urandom(4096))
    yield "a page of noise"
    path.unlink()
    yield "no file"


def test_a_damaged_index_is_written_anew(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        assert tier.write(KEYS, None, view_of(SMALL_LAYOUT, BLOCKS), deadline_s=60) == SLOTS
    saved = {path: path.read_bytes() for path in tmp_path.glob("*.kvp")}
    for how in damage_index(tmp_path, random.Random(5)):
        assert kinds(checked(tmp_path)) == {"index"}, how
        with open_tier(tmp_path) as tier:
            assert (tier.recovery.source, tier.recovery.blocks) == ("headers", SLOTS), how
        assert served(tmp_path) == (set(range(SLOTS)), 0), how
        assert checked(tmp_path).findings == (), how
        for path, raw in saved.items():  # as it was when the index was damaged
            path.write_bytes(raw)


def test_an_index_behind_a_link_is_written_anew_too(tmp_path: Path) -> None:
    """Damage behind a link must be followed by LMDB as little as any other."""
    store, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    with open_tier(store) as tier:
        assert tier.write(KEYS, None, view_of(SMALL_LAYOUT, BLOCKS), deadline_s=60) == SLOTS
    (store / "index").rename(elsewhere)
    (store / "index").symlink_to(elsewhere)
    path = elsewhere / "data.mdb"
    path.write_bytes(bytes(4096) + os.urandom(path.stat().st_size - 4096))
    noise = path.read_bytes()[4096:8192]
    with open_tier(store) as tier:
        assert (tier.recovery.source, tier.recovery.blocks) == ("headers", SLOTS)
    assert noise not in path.read_bytes()
    assert served(store) == (set(range(SLOTS)), 0)
    assert checked(store).findings == ()
    (store / "index").unlink()
    (store / "index").write_text("no folder")
    assert served(store) == (set(range(SLOTS)), 0)
    assert checked(store).findings == ()


def test_a_damaged_superblock(folder: Path) -> None:
    raw = bytearray((folder / "store.kvp").read_bytes())
    raw[20] ^= 1
    (folder / "store.kvp").write_bytes(raw)
    assert "superblock" in kinds(checked(folder))
    assert served(folder)[0] == set(range(SLOTS))
    raw[20] ^= 1
    raw[30] ^= 1
    raw[4096 + 30] ^= 1
    (folder / "store.kvp").write_bytes(raw)
    with pytest.raises(CorruptionError, match="remove the folder"):
        open_tier(folder)
    with pytest.raises(CorruptionError, match="remove the folder"):
        checked(folder)


def test_any_flipped_bit_of_the_superblock(tmp_path: Path, count: Count) -> None:
    """One copy is damaged, the other one serves: fsck says which, and mends it."""
    with open_tier(tmp_path) as tier:
        assert tier.write(KEYS, None, view_of(SMALL_LAYOUT, BLOCKS), deadline_s=60) == SLOTS
    bits = random.Random(4).sample(range(8 * 8192), count(8, 2000))
    for bit in bits:
        flip(tmp_path / "store.kvp", bit)
        report = checked(tmp_path)
        assert kinds(report) == {"superblock"}, bit
        assert f"copy {bit // 8 // 4096} " in report.findings[0].meaning, bit
        assert served(tmp_path) == (set(range(SLOTS)), 0), bit
        # Opened and closed twice, so both copies were written anew.
        with open_tier(tmp_path):
            assert checked_is_refused(tmp_path)
        assert checked(tmp_path).findings == (), bit


def checked_is_refused(folder: Path) -> bool:
    """Say whether a store that is open cannot be checked."""
    try:
        checked(folder)
    except UnavailableError:
        return True
    return False


def test_damaged_intents_are_no_intents(folder: Path) -> None:
    (folder / "intents.kvp").write_bytes(os.urandom(8192))
    assert served(folder) == (set(range(SLOTS)), 0)


def test_fsck_mends(folder: Path) -> None:
    flip(segment(folder, 0), 8 * (SIZE + 4096) + 77)
    flip(segment(folder, 0), 8 * 20)
    os.truncate(segment(folder, 1), SIZE)
    command = [sys.executable, "-m", "kvpool.cli.main", "fsck", str(folder)]
    status = [
        subprocess.run([*command, *flags], capture_output=True, check=False).returncode
        for flags in ([], ["--repair"], [], ["--json"])
    ]
    assert status == [1, 0, 0, 0]
    assert served(folder) == ({2, 3}, 0)
