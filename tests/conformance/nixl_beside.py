"""NIXL, with the UCX inside its wheel, and kvpool's engine in one process, either one first.

Run where NIXL is installed: ``test_ucxx_transport.py`` runs this file there.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvpool.testing.blocks import payload, view_of
from kvpool.testing.pair import Pair, empty
from kvpool.testing.transport_suite import TransportSuite
from kvpool.transfer.ucx import UcxTransport

BYTES = 1 << 20
TURNS = 8


class _Ours(TransportSuite):
    def open_transport(self) -> UcxTransport:
        return UcxTransport()

    def fresh_address(self) -> str:
        return "ucx://127.0.0.1:0"


class _Theirs:
    """Two agents of NIXL; one writes into the other's memory."""

    def __init__(self) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        config = nixl_agent_config(backends=["UCX"])
        self.source = np.random.default_rng(1).integers(0, 256, BYTES, dtype=np.uint8)
        self.dest = np.zeros_like(self.source)
        self.agents = [nixl_agent(name, config) for name in ("writer", "written")]
        writer, written = self.agents
        for agent, memory in ((writer, self.source), (written, self.dest)):
            agent.register_memory([(memory.ctypes.data, BYTES, 0, "")], "DRAM")
        self.peer = writer.add_remote_agent(written.get_agent_metadata())

    def write(self) -> None:
        writer = self.agents[0]
        work = writer.initialize_xfer(
            "WRITE",
            writer.get_xfer_descs([(self.source.ctypes.data, BYTES, 0)], "DRAM"),
            writer.get_xfer_descs([(self.dest.ctypes.data, BYTES, 0)], "DRAM"),
            self.peer,
        )
        state = writer.transfer(work)
        for _ in range(10_000_000):
            if state != "PROC":
                break
            state = writer.check_xfer_state(work)
        assert state == "DONE"
        writer.release_xfer_handle(work)
        np.testing.assert_array_equal(self.dest, self.source)
        self.source += 1


def _read(pair: Pair, turn: int) -> None:
    blocks, out = payload(pair.arena.layout, 2, seed=turn), empty(pair.arena.layout, 2)
    slots = pair.publish(blocks)
    assert pair.read(view_of(pair.arena.layout, out), slots) == 2
    np.testing.assert_array_equal(out, blocks)
    for slot in slots:
        pair.arena.release(slot)


def main(first: str) -> None:
    """Be the process."""
    theirs = _Theirs() if first == "nixl" else None
    with _Ours().open_pair() as pair:
        _read(pair, 100)
        theirs = theirs or _Theirs()
        for turn in range(TURNS):
            theirs.write()
            _read(pair, turn)
    theirs.write()
    mapped = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/libucp" in line
    }
    assert len(mapped) == 2, mapped  # NIXL's own, and ours
    print("both moved their bytes")


@pytest.mark.parametrize("first", ["nixl", "kvpool"])
def test_both_move_their_bytes(first: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"from tests.conformance.nixl_beside import main; main({first!r})"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "both moved their bytes" in done.stdout
