"""An SSD tier on a disk, and in a system, that fails: typed errors or misses, and then it goes on."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvpool import pool
from kvpool.errors import CapacityError, ConfigError, UnavailableError, UsageError
from kvpool.testing.blocks import SMALL_LAYOUT, key, payload, view_of
from kvpool.tiers import stack
from kvpool.tiers.ssd import SsdTier
from kvpool.tiers.ssd_format import slot_bytes
from kvpool.tiers.ssd_fsck import check_store
from tests.faults import ssd_interrupts, ssd_scenes
from tests.tidy.mirror import ROOT

SLOTS = 8
HOLDER = """
import sys, pathlib
from tests.faults.test_ssd_disk import open_tier, put
tier = open_tier(pathlib.Path(sys.argv[1]))
put(tier)
print("open", flush=True)
input()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("disk") / "disk.so"
    source = Path(__file__).with_name("disk.c")
    flags = ["-O1", "-shared", "-fPIC", "-ldl", "-pthread"]
    subprocess.run(["gcc", "-o", str(built), str(source), *flags], check=True)
    return built


SCENES = [
    pytest.param(module.__name__, scene.__name__, id=scene.__name__)
    for module in (ssd_scenes, ssd_interrupts)
    for scene in module.SCENES
]


@pytest.mark.parametrize(("module", "name"), SCENES)
def test_scene(module: str, name: str, library: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, name, tmp_path / "store"],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@contextmanager
def limited(kind: int, value: int) -> Generator[None, None, None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def test_a_pool_closes_within_its_time_whatever_the_disk_does() -> None:
    """The parts of the five seconds of ``BlockPool.close``; the scene shows that each one ends."""
    waits = (pool._CLOSE_TIMEOUT_S, stack._CLOSE_TIMEOUT_S, pool._SSD_TIMEOUT_S)
    assert sum(waits) < 5.0


def open_tier(folder: Path, slots: int = SLOTS) -> SsdTier:
    return SsdTier(folder, SMALL_LAYOUT, slots, threads=2, timeout_s=60)


def put(tier: SsdTier) -> None:
    blocks = payload(SMALL_LAYOUT, 1, seed=1)
    assert tier.write(key(0), None, view_of(SMALL_LAYOUT, blocks), deadline_s=60) == 1


def test_no_descriptors_left(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    in_use = len(os.listdir("/proc/self/fd"))
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    for more in range(12):
        with limited(resource.RLIMIT_NOFILE, highest + 1 + more):
            try:
                open_tier(folder).close()
            except (UnavailableError, CapacityError) as error:
                assert "ulimit -n" in str(error)
        assert len(os.listdir("/proc/self/fd")) <= in_use
    with open_tier(folder) as tier:
        put(tier)
        with limited(resource.RLIMIT_NOFILE, 3):  # at work it needs none
            put(tier)
            tier.flush(60)


def test_a_limit_on_file_sizes_is_no_room(tmp_path: Path) -> None:
    with limited(resource.RLIMIT_FSIZE, 16384):
        with pytest.raises(CapacityError, match="give the tier fewer bytes"):
            open_tier(tmp_path)
        assert not list(tmp_path.glob("segment*"))
    report = check_store(tmp_path, mend=False)
    assert (report.blocks, report.findings) == (0, ())  # nothing is lost that never was
    (tmp_path / "segment-0007.kvp").write_bytes(b"of a process that was killed when it made them")
    with open_tier(tmp_path, SLOTS - 1) as tier:  # as it was told to
        put(tier)
    assert [path.name for path in tmp_path.glob("segment*")] == ["segment-0000.kvp"]
    with pytest.raises(ConfigError, match=f"{SLOTS - 1} slots"):
        open_tier(tmp_path)
    with open_tier(tmp_path, SLOTS - 1) as tier:
        assert tier.match(key(0)) == 1


def test_a_folder_has_one_tier_at_a_time(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            HOLDER,
            tmp_path,
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(UnavailableError, match="another process"):
            open_tier(tmp_path)
        holder.kill()
        holder.wait(60)
        with open_tier(tmp_path) as tier:
            assert tier.match(key(0)) == 1
            with pytest.raises(UnavailableError, match="another process"):
                open_tier(tmp_path)


def test_a_path_that_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be opened.*a folder of its own"):
        open_tier(tmp_path / "file")
    with pytest.raises(UsageError, match="choose a folder"):
        open_tier(Path("/sys/kvpool-store"))  # where nobody may make a folder


def test_another_size_or_layout_is_refused(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        put(tier)
    with pytest.raises(ConfigError, match=f"{SLOTS} slots"):
        open_tier(tmp_path, SLOTS + 1)
    other = type(SMALL_LAYOUT)(num_layers=1, kv_heads=1, block_tokens=16, k_dim=4, v_dim=4)
    with pytest.raises(ConfigError, match="another folder"):
        SsdTier(tmp_path, other, SLOTS)
    with open_tier(tmp_path) as tier:
        assert tier.match(key(0)) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Path, None, None]:
    """Mount an ext4 of 8 MiB."""
    mkfs = shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin")
    if os.geteuid() != 0 or mkfs is None:
        pytest.skip("needs root and mkfs.ext4; a limit on file sizes and disk.c stand in for it")
    image, mounted = tmp_path / "image", tmp_path / "mounted"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(8 << 20)
    subprocess.run([mkfs, "-q", "-F", str(image)], check=True)
    made = subprocess.run(["mount", "-o", "loop", image, mounted], check=False, capture_output=True)
    if made.returncode:
        pytest.skip(f"needs a loop device: {made.stderr.decode()}")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    with pytest.raises(CapacityError, match="No space left"):
        open_tier(small_disk / "store", (32 << 20) // slot_bytes(SMALL_LAYOUT))
    assert not list((small_disk / "store").glob("segment*"))
    with open_tier(small_disk / "store2", 64) as tier:
        filler = small_disk / "filler"
        with filler.open("wb") as file:
            try:
                while file.write(bytes(1 << 16)):
                    file.flush()
            except OSError:
                pass
        # Its own room was taken when it was opened; only the index may want for some.
        for number in range(200):
            blocks = payload(SMALL_LAYOUT, 1, seed=number)
            source = view_of(SMALL_LAYOUT, blocks)
            assert tier.write(key(number), None, source, deadline_s=60) == 1
        assert tier.stats().ready == 64
    filler.unlink()
    with open_tier(small_disk / "store2", 64) as tier:
        assert tier.stats().ready == 64
        assert tier.match(key(199)) == 1


def test_a_disk_that_turns_read_only(small_disk: Path) -> None:
    """As ext4 does on an error of its own; what was durable is there when it is mounted again."""
    with open_tier(small_disk / "store") as tier:
        put(tier)
        subprocess.run(["mount", "-o", "remount,abort", str(small_disk)], check=True)
        source = view_of(SMALL_LAYOUT, payload(SMALL_LAYOUT, 1, seed=2))
        with pytest.raises(UnavailableError, match="store"):
            tier.write(key(1), None, source, deadline_s=60)
        assert (tier.match(key(0)), tier.match(key(1))) == (1, 0)
    with pytest.raises(UsageError, match="choose a folder"):
        open_tier(small_disk / "other")
    subprocess.run(["umount", str(small_disk)], check=True)
    image = small_disk.with_name("image")
    subprocess.run(["mount", "-o", "loop", str(image), str(small_disk)], check=True)
    with open_tier(small_disk / "store") as tier:
        assert (tier.recovery.source, tier.match(key(0))) == ("headers", 1)
        assert tier.write(key(1), None, source, deadline_s=60) == 1
