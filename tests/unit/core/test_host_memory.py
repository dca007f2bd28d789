from pathlib import Path

import pytest

from kvpool.arena import Arena
from kvpool.block import new_incarnation
from kvpool.errors import CapacityError
from kvpool.host_memory import Limit, memory_limit
from kvpool.testing.blocks import SMALL_LAYOUT

MIB = 1 << 20


def host(root: Path, *, available: int, group: str) -> tuple[Path, Path]:
    """Lay out a procfs whose machine has ``available`` bytes and whose process is in ``group``."""
    proc = root / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable: {available >> 10} kB\n")
    (proc / "self" / "cgroup").write_text(group)
    return proc, root / "cgroup"


def limit_v2(folder: Path, most: int | str, taken: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{taken}\n")
    (folder / "memory.stat").write_text(f"anon 1\nactive_file {cache}\ninactive_file 0\n")


def test_the_machine_limits_where_no_group_does(tmp_path: Path) -> None:
    proc, groups = host(tmp_path, available=64 * MIB, group="0::/\n")
    limit = memory_limit(proc, groups)
    assert limit is not None and limit.available_bytes == 64 * MIB
    assert "MemAvailable" in limit.source


def test_the_tightest_group_above_limits(tmp_path: Path) -> None:
    proc, groups = host(tmp_path, available=64 * MIB, group="0::/a/b\n")
    limit_v2(groups / "a" / "b", "max", 0)
    limit_v2(groups / "a", 20 * MIB, 15 * MIB, cache=3 * MIB)
    assert memory_limit(proc, groups) == Limit(
        8 * MIB, f"the limit of control group {groups / 'a'}"
    )


def test_a_container_sees_its_own_group_at_the_root(tmp_path: Path) -> None:
    proc, groups = host(tmp_path, available=64 * MIB, group="0::/../host/path\n")
    limit_v2(groups, 10 * MIB, 12 * MIB)
    limit = memory_limit(proc, groups)
    assert limit is not None and limit.available_bytes == 0


def test_groups_of_version_1(tmp_path: Path) -> None:
    proc, groups = host(tmp_path, available=64 * MIB, group="3:cpu:/x\n2:memory:/x\n")
    folder = groups / "memory" / "x"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{9 * MIB}")
    (folder / "memory.usage_in_bytes").write_text(f"{2 * MIB}")
    limit = memory_limit(proc, groups)
    assert limit is not None and limit.available_bytes == 7 * MIB


def test_a_host_that_tells_nothing_limits_nothing(tmp_path: Path) -> None:
    assert memory_limit(tmp_path / "proc", tmp_path / "cgroup") is None


def test_this_machine_has_a_limit() -> None:
    limit = memory_limit()
    assert limit is not None and limit.available_bytes > 0


def test_an_arena_larger_than_the_machine_is_refused_before_a_page_is_touched() -> None:
    count = (1 << 50) // SMALL_LAYOUT.block_bytes  # a PiB: touching it would end the process
    with pytest.raises(CapacityError, match=r"MiB.*leaves \d+ MiB: ask for less"):
        Arena(SMALL_LAYOUT, min(count, 2**32 - 1), new_incarnation())
