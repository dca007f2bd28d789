"""What kvpool doctor asks a host: libraries, programs and the kernel of the one it runs on."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.cli import doctor
from kvpool.cli.doctor_host import addresses, chosen_library, examine, other_libraries, said
from kvpool.cli.doctor_report import Check
from kvpool.cli.doctor_ucx import attempt
from kvpool.cli.main import main
from kvpool.transfer.ucx_library import modules_beside


def test_what_another_program_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card is named by nvidia-smi; one that is missing, fails or hangs names none."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert said("nvidia-smi") == []
    program = tmp_path / "nvidia-smi"
    for text, lines in {
        "echo NVIDIA H200, 570.86.15; echo NVIDIA L4, 570.86.15": 2,
        "echo no devices; exit 6": 0,
        "exec /bin/sleep 60": 0,
    }.items():
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        assert len(said("nvidia-smi", timeout_s=1 if "sleep" in text else 20)) == lines


def test_libraries_are_looked_for_in_the_usual_folders(tmp_path: Path) -> None:
    (tmp_path / "usr/lib/x86_64-linux-gnu/ucx").mkdir(parents=True)
    (tmp_path / "opt/hpcx/ucx/lib").mkdir(parents=True)
    real = tmp_path / "usr/lib/x86_64-linux-gnu/libucp.so.0"
    real.touch()
    (tmp_path / "usr/lib/libucp.so.0").symlink_to(real)
    hpcx = tmp_path / "opt/hpcx/ucx/lib/libucp.so.0"
    hpcx.touch()
    assert other_libraries(tmp_path, "libucp.so") == [
        str(tmp_path / "usr/lib/libucp.so.0"),
        str(hpcx),
    ]
    assert other_libraries(tmp_path, str(real)) == [str(hpcx)]
    for name in ("libuct_ib.so.0", "libuct_ib.so.0.0.0", "libuct_cma.so.0", "libucm_cuda.so"):
        (tmp_path / "usr/lib/x86_64-linux-gnu/ucx" / name).touch()
    assert modules_beside(tmp_path / "usr/lib/libucp.so.0") == ("cma", "ib")


def test_addresses_of_devices(tmp_path: Path) -> None:
    (tmp_path / "sys/class/net/lo").mkdir(parents=True)
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/if_inet6").write_text(
        "fd000000000000000000000000000002 04 40 00 82     eth7\n"
        "fe8000000000000000fc00fffe000001 04 40 20 80     eth7\n"
    )
    # The kernel is asked for IPv4; a device of this name is on every Linux host.
    assert addresses(tmp_path) == {"lo": ("127.0.0.1",), "eth7": ("fd00::2",)}
    (tmp_path / "proc/net/if_inet6").unlink()
    (tmp_path / "sys/class/net/no-such-device").mkdir()
    assert addresses(tmp_path) == {"lo": ("127.0.0.1",), "no-such-device": ()}


def test_the_library_of_the_wheel_puts_without_a_copy() -> None:
    found = chosen_library(None)
    assert found.problem == ""
    assert re.fullmatch(r"1\.\d+\.\d+", found.version)
    # An earlier test may have loaded it: then there is no choice any more.
    assert re.search("the libucx-cu12 wheel|loaded already", found.why)
    assert "zero-copy" in found.put_protocol
    assert "cma" in found.modules


def test_a_library_that_is_not_one(tmp_path: Path) -> None:
    path = tmp_path / "libucp.so"
    path.write_text("no library")
    found = chosen_library(str(path))
    assert (found.path, found.why, found.version) == (str(path), "the one that is configured", "")
    assert "UCX does not start" in found.problem


def test_a_library_that_ends_its_process(tmp_path: Path) -> None:
    compiler = shutil.which("gcc")
    assert compiler is not None, "gcc builds the C core"
    source, library = tmp_path / "bad.c", tmp_path / "libucp.so"
    source.write_text(
        "#include <stdlib.h>\n__attribute__((constructor)) static void go(void) { abort(); }\n"
    )
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True)
    found = attempt(str(library))
    assert found.problem == "its process ended with -6 and said: nothing"


def test_a_library_that_hangs() -> None:
    # The process has not even started Python by then.
    assert attempt("libucp.so", timeout_s=0.001).problem == "no answer within 0.001 s"


def test_this_host(capsys: pytest.CaptureFixture[str]) -> None:
    before = os.listdir("/proc/self/fd")
    status = main(["doctor", "--json", "--dram", "1MiB"])
    assert set(os.listdir("/proc/self/fd")) <= set(before)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(list(row) == list(Check.__slots__) for row in rows)
    found = {row["name"]: row for row in rows}
    assert len(found) == len(rows) == len(doctor.CHECKS)
    # What the other tests need is here, or they could not run.
    for name in ("memory.dram", "kernel.memfd", "kernel.pidfd", "packages.kvpool", "ucx.library"):
        assert found[name]["status"] == "ok", found[name]
    assert status == 0


def test_this_host_asks_for_too_much(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--dram", "900TiB", "--bind", "203.0.113.7"]) == 1
    shown = capsys.readouterr().out
    assert shown.endswith("Essential and lacking: memory.dram.\n")
    assert "203.0.113.7 cannot be bound: Cannot assign requested address" in shown


def test_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--dram", "much"]) == 2
    assert "--dram is 'much'" in capsys.readouterr().err


def test_torch_is_asked_only_on_request() -> None:
    asked = examine(dram_bytes=1, bind="127.0.0.1", library=None, ask_torch=True)
    assert re.fullmatch(r"CUDA \S+ with \d+ devices", asked.torch_cuda)
    code = "import sys, kvpool.cli.main as m; m.main(['doctor']); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
