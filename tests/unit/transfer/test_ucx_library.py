"""Which libucp is loaded, and why; and that ours works beside another one in the process."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.config import TransferConfig
from kvpool.errors import ConfigError
from kvpool.transfer import ucx_library
from kvpool.transfer.choice import open_transport
from kvpool.transfer.ucx import UcxTransport
from kvpool.transfer.ucx_library import Candidate, choose_library, decide, system, wheel

WHEEL = Candidate("/wheel/libucp.so", (1, 22, 0), ("cma", "cuda"))
SAME = Candidate("/usr/lib/libucp.so.0", (1, 22, 0), ("cma",))
NEWER = Candidate("/usr/lib/libucp.so.0", (1, 23, 1), ("cma",))
ABLE = Candidate("/opt/ucx/lib/libucp.so.0", (1, 18, 0), ("cma", "ib"))
OLD = Candidate("/usr/lib/libucp.so.0", (1, 13, 1), ("ib",))


@pytest.mark.parametrize(
    ("of_wheel", "of_system", "rdma", "path", "why"),
    [
        (WHEEL, [], False, WHEEL.path, "the one of the libucx-cu12 wheel"),
        (WHEEL, [], True, WHEEL.path, "the one of the libucx-cu12 wheel"),
        (WHEEL, [SAME], True, WHEEL.path, "no older than the system's UCX 1.22.0"),
        (WHEEL, [NEWER], False, NEWER.path, "UCX 1.23.1 is newer than the wheel's UCX 1.22.0"),
        (WHEEL, [ABLE], False, WHEEL.path, "no older than the system's UCX 1.18.0"),
        (WHEEL, [ABLE], True, ABLE.path, "it knows this host's RDMA devices"),
        (WHEEL, [NEWER, ABLE], True, ABLE.path, "it knows this host's RDMA devices"),
        (WHEEL, [NEWER, ABLE], False, NEWER.path, "newer"),
        (WHEEL, [OLD], True, WHEEL.path, "the one of the libucx-cu12 wheel"),
        (None, [ABLE], False, ABLE.path, "the system's"),
        (None, [OLD], True, "libucp.so.0", "no other is installed"),
        (None, [], False, "libucp.so.0", "no other is installed"),
    ],
)
def test_the_choice(
    of_wheel: Candidate | None, of_system: list[Candidate], rdma: bool, path: str, why: str
) -> None:
    choice = decide(of_wheel, of_system, rdma=rdma)
    assert choice.path == path
    assert why in choice.why


def test_what_is_configured_comes_first() -> None:
    assert choose_library("/anywhere/libucp.so").path == "/anywhere/libucp.so"
    assert choose_library("/anywhere/libucp.so").why == "the one that is configured"


def fake(folder: Path, version: str, modules: tuple[str, ...] = ()) -> None:
    """Put a library into a folder that says its version, and modules beside it."""
    (folder / "ucx").mkdir(parents=True)
    code = (
        "void ucp_get_version(unsigned *a, unsigned *b, unsigned *c)"
        f"{{ unsigned v[3] = {{{version}}}; *a = v[0]; *b = v[1]; *c = v[2]; }}"
    )
    compiler = shutil.which("gcc")
    assert compiler is not None, "gcc builds the C core"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", folder / "libucp.so.0"],
        input=code.encode(),
        check=True,
    )
    for module in modules:
        (folder / "ucx" / f"libuct_{module}.so.0").touch()


def test_what_a_system_has(tmp_path: Path) -> None:
    fake(tmp_path / "usr/lib/x86_64-linux-gnu", "1, 20, 3", ("ib", "cma"))
    (tmp_path / "usr/lib/libucp.so.0").symlink_to("x86_64-linux-gnu/libucp.so.0")
    (tmp_path / "opt/broken/lib").mkdir(parents=True)
    (tmp_path / "opt/broken/lib/libucp.so.0").write_text("no library")
    found = system(tmp_path)
    assert [(one.version, one.modules) for one in found] == [((1, 20, 3), ("cma", "ib"))]
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    said = in_a_process(
        "from pathlib import Path; from kvpool.transfer.ucx_library import choose_library\n"
        f"choice = choose_library(root=Path({str(tmp_path)!r}))\n"
        "print(json.dumps([choice.path, choice.why]))"
    )
    assert json.loads(said)[0] == str(tmp_path / "usr/lib/libucp.so.0")
    assert "RDMA" in json.loads(said)[1]


@pytest.mark.ucx
def test_the_wheel_is_found() -> None:
    found = wheel()
    assert found is not None
    assert found.version >= ucx_library.OLDEST
    assert "cma" in found.modules


# A second UCX, as NIXL's wheel brings one: its libraries are named apart, so that both are mapped.
BESIDE = """
import ctypes
from kvpool.transfer.ucx_library import choose_library
other = {other!r}
theirs = ctypes.CDLL(f"{{other}}/libucp-nixl.so.0", ctypes.RTLD_LOCAL)
from tests.unit.transfer.test_ucx_addresses import Node
one, two = Node(), Node()
one.read_from(two)
context = ctypes.c_void_p()
versions = [ctypes.c_uint() for _ in range(3)]
theirs.ucp_get_version(*map(ctypes.byref, versions))
for node in (one, two):
    node.close()
lines = open("/proc/self/maps").read().splitlines()
print(json.dumps([
    choose_library().path,
    sorted({{line.split()[-1] for line in lines if "libucp" in line}}),
    versions[1].value,
]))
"""


@pytest.mark.ucx
def test_ours_works_beside_another_in_the_process(tmp_path: Path) -> None:
    found = wheel()
    assert found is not None
    folder = Path(found.path).parent
    renamed(folder, tmp_path)
    said = in_a_process(BESIDE.format(other=str(tmp_path)))
    path, mapped, minor = json.loads(said)
    assert Path(path).parent == folder
    assert len(mapped) == 2, mapped
    assert minor == found.version[1]


@pytest.mark.ucx
def test_another_with_global_symbols_is_refused(tmp_path: Path) -> None:
    """Its functions would be called by our libraries instead of their own."""
    found = wheel()
    assert found is not None
    renamed(Path(found.path).parent, tmp_path)
    said = in_a_process(
        "import ctypes; from kvpool.errors import ConfigError\n"
        f"ctypes.CDLL('{tmp_path}/libucp-nixl.so.0', ctypes.RTLD_GLOBAL)\n"
        "from kvpool.transfer.ucx_engine import UcxEngine\n"
        "try: UcxEngine()\n"
        "except ConfigError as error: print(error)"
    )
    assert f"{tmp_path}/libucp-nixl.so.0 is loaded with global symbols" in said


def renamed(folder: Path, to: Path) -> None:
    """Copy a UCX under other names, inside and out, as auditwheel names what it brings along."""
    names = ("libucm", "libucs", "libuct", "libucp")
    for name in names:
        code = (folder / f"{name}.so.0").read_bytes()
        for other in names:
            # As long as before, since names lie in a table: the zero behind them is kept.
            code = code.replace(f"{other}.so.0\0".encode(), f"{short(other)}\0".encode())
        (to / f"{name}-nixl.so.0").write_bytes(code)
        (to / short(name)).symlink_to(f"{name}-nixl.so.0")


def short(name: str) -> str:
    return f"nx{name[-3:]}.so.0n"


def in_a_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import json\n{code}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.ucx
def test_the_configuration_names_the_library() -> None:
    of_wheel = wheel()
    assert of_wheel is not None
    with open_transport("ucx", "named", TransferConfig(ucx_library=of_wheel.path)) as transport:
        assert isinstance(transport, UcxTransport)
        assert transport.library == of_wheel.path
    with pytest.raises(ConfigError, match="libucp"):
        open_transport("ucx", "named", TransferConfig(ucx_library="/nowhere/libucp.so"))


@pytest.mark.ucx
@pytest.mark.parametrize("transports", ["nothing", "", "tcp\0", "rc"])
def test_transports_that_libucp_cannot_use_are_named(transports: str) -> None:
    """``rc`` is RDMA, which the machines that tests run on have not got."""
    with pytest.raises(ConfigError, match="transfer.ucx_transports"):
        open_transport("ucx", "named", TransferConfig(ucx_transports=transports))


@pytest.mark.ucx
def test_the_configuration_names_the_transports() -> None:
    with open_transport("ucx", "named", TransferConfig(ucx_transports="tcp,self")) as transport:
        assert isinstance(transport, UcxTransport)
