"""What ``docs/server.md`` tells operators to do, done: its file for two hosts, its commands, its unit."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvpool
from kvpool.client.access import ClientAccess
from kvpool.errors import KVPoolError, UsageError
from kvpool.server import options
from kvpool.testing.blocks import view_of
from tests.certificates import Authority
from tests.etcd_process import free_port
from tests.faults.pool_client import CHAIN_BLOCKS, LAYOUT, PATIENT, WAIT_S, blocks_of, chain_of
from tests.server_process import ServerProcess
from tests.waiting import until

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "server.md").read_text()
UNIT = ROOT / "examples" / "kvpool-server.service"
DRAM_BYTES = 64 * LAYOUT.block_bytes


def blocks(language: str) -> list[str]:
    """Return the document's blocks of code in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT, re.DOTALL | re.MULTILINE)


class Hosts:
    """The document's two hosts, on this one: its file with paths, ports and sizes of here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder)
        self.addresses = {name: f"127.0.0.1:{free_port()}" for name in "ab"}
        for name in ("pool.secret", "server.token", "red.token"):
            (folder / name).write_text(f"{name} {'x' * 40}\n".replace(" ", "-"))
            (folder / name).chmod(0o600)
        self.red = self.authority.issue("red")

    def start(self, name: str) -> ServerProcess:
        own = self.folder / f"host {name}"
        own.mkdir()
        files = self.authority.issue(name)
        text = blocks("toml")[0]
        # The first address is the host's own, the two others are the list's.
        text = text.replace('address = "10.0.0.1:7420"', f'address = "{self.addresses[name]}"', 1)
        text = text.replace("10.0.0.1:7420", self.addresses["a"])
        text = text.replace("10.0.0.2:7420", self.addresses["b"])
        text = text.replace("127.0.0.1:9420", f"127.0.0.1:{free_port()}")
        text = text.replace('name = "a"  ', f'name = "{name}"  ', 1)
        text = text.replace("/etc/kvpool/a.pem", str(files.certificate))
        text = text.replace("/etc/kvpool/a.key", str(files.key))
        text = text.replace("/etc/kvpool", str(self.folder))
        text = text.replace("/var/lib/kvpool", str(own)).replace('"1TiB"', f'"{4 << 20}"')
        config = own / "pool.toml"
        config.write_text(text)
        return ServerProcess(own / "run", DRAM_BYTES, "--config", str(config))

    def access(self, token: str) -> ClientAccess:
        text = (self.folder / token).read_text().strip()
        return self.authority.access(self.red, token=text)

    def command(self, said: str) -> str:
        """Run a command of the document against the first host."""
        arguments = shlex.split(said, comments=True)
        assert arguments.pop(0) == "kvpool"
        at = arguments.index("--run-dir")
        said = " ".join(
            re.findall(r"`(--(?:server|ca-file|certificate-file) .*?)` (?:in|where)", DOCUMENT)
        )
        flags = shlex.split(said)
        own = {
            "--server": self.addresses["a"],
            "--ca-file": str(self.authority.ca),
            "--token-file": str(self.folder / "server.token"),
            "--certificate-file": str(self.red.certificate),
            "--key-file": str(self.red.key),
        }
        assert flags[::2] == list(own), "the document says what is needed"
        flags[1::2] = own.values()
        arguments[at : at + 2] = flags
        ran = subprocess.run(
            [sys.executable, "-m", "kvpool.cli.main", *arguments],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    made = Hosts(tmp_path_factory.mktemp("hosts"))
    with ExitStack() as stack:
        for name in "ab":
            stack.enter_context(made.start(name))
        yield made


def test_its_two_hosts_are_one_pool(hosts: Hosts) -> None:
    target = ",".join(hosts.addresses.values())
    config = replace(PATIENT, replicas=2)
    pool = kvpool.connect(target, LAYOUT, WAIT_S, config=config, access=hosts.access("red.token"))
    with pool:
        source = blocks_of(1)

        def stored() -> bool:
            done = pool.store(chain_of(pool, 1), view_of(LAYOUT, source), deadline_s=WAIT_S)
            return not done.wait(WAIT_S).refused

        until(stored, "both hosts have the chain")
        found = np.zeros_like(source)
        with pool.lease(pool.match(chain_of(pool, 1)), 30) as lease:
            load = pool.load(lease, view_of(LAYOUT, found), deadline_s=WAIT_S)
            assert load.wait(WAIT_S) == CHAIN_BLOCKS
        np.testing.assert_array_equal(found, source)
        first = chain_of(pool, 1)[0].hex()
    for said in [line for block in blocks("") for line in block.splitlines() if "kvpool " in line]:
        if not said.startswith("kvpool ") or said.startswith("kvpool top"):
            continue
        shown = hosts.command(said.replace("HEX", first))
        assert "a" in shown and "b" in shown, said


def test_its_client_is_of_both(hosts: Hosts) -> None:
    [text] = blocks("python")
    text = text.replace("10.0.0.1:7420", hosts.addresses["a"])
    text = text.replace("10.0.0.2:7420", hosts.addresses["b"])
    text = text.replace('files / "ca.pem"', f'files / "{hosts.authority.ca}"')
    text = text.replace('files / "red.pem"', f'files / "{hosts.red.certificate}"')
    text = text.replace('files / "red.key"', f'files / "{hosts.red.key}"')
    text = text.replace("/etc/kvpool", str(hosts.folder))
    ran = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "'nodes': 2" in ran.stdout


def test_it_lets_nobody_else_in(hosts: Hosts) -> None:
    token_alone = replace(hosts.access("red.token"), certificate=b"", key=b"")
    certificate_alone = replace(hosts.access("red.token"), token="")
    for access, said in ((token_alone, KVPoolError), (certificate_alone, UsageError)):
        with pytest.raises(said):
            kvpool.connect(hosts.addresses["a"], LAYOUT, 5.0, access=access)


def test_its_unit_starts_what_there_is(tmp_path: Path) -> None:
    [started] = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), re.MULTILINE)
    program, *arguments = shlex.split(started)
    assert Path(program).name == "kvpool-server"
    parsed = options.arguments_of(arguments)
    assert str(parsed.config) == "/etc/kvpool/pool.toml"
    verify = shutil.which("systemd-analyze")
    if verify is None:
        return  # where systemd is not, its own check of the unit is not either
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace(program, sys.executable))
    ran = subprocess.run(
        [verify, "verify", str(unit)], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
