"""The rows against peers: their names, and what is said where a peer is not installed."""

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvpool.cli import bench, bench_peers
from kvpool.cli.bench_ucx import Child
from kvpool.errors import UsageError


def test_the_names_are_stable() -> None:
    assert [case.name for case in bench.cases_of("peers", True)] == [
        "peers.nixl.tcp.write.1MiB",
        "peers.nixl.tcp.read.1MiB",
        "peers.mooncake.tcp.write.1MiB",
        "peers.nixl.host.read.1MiB",
        "peers.ucxx.tcp.write.1MiB",
        "peers.ucxx.tcp.read.1MiB",
        "peers.ucxx.transport.read.1MiB",
    ]


@pytest.mark.parametrize("peer", ["nixl", "mooncake", "ucxx"])
def test_a_peer_that_is_not_installed_is_named_with_the_commands(peer: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"{tmp_path}/{peer}/bin/pip install .*{peer}"):
        bench_peers.interpreter(peer, tmp_path)
    (tmp_path / peer / "bin").mkdir(parents=True)
    python = tmp_path / peer / "bin" / "python"
    python.touch()
    assert bench_peers.interpreter(peer, tmp_path) == python


def test_what_an_engine_says_for_itself_is_passed_over() -> None:
    """A stand-in for a peer's environment: a program that chatters and then answers."""
    program = (
        "print('I0101 hello'); print('kvpool:ready', flush=True)\nfor line in iter(input, ''):"
    )
    program += "\n print('chatter'); print('kvpool:0.5', flush=True)"
    with ExitStack() as stack:
        child = Child(stack, sys.executable, "-c", program)
        assert bench_peers.said(child, "") == "ready"
        assert float(bench_peers.said(child, "write 1 1 1")) == 0.5
