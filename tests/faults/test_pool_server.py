"""A server and its clients when one of them is killed, stopped, damaged or fed with garbage."""

import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.base import Match, StoreResult
from kvpool.client.connect import connect
from kvpool.client.remote import RemotePool
from kvpool.completion import Completion
from kvpool.config import TransferConfig
from kvpool.errors import (
    KVPoolError,
    PeerUnreachableError,
    TransferTimeoutError,
    UnavailableError,
)
from kvpool.testing.blocks import view_of
from tests.faults.pool_client import (
    CHAIN_BLOCKS,
    LAYOUT,
    PATIENT,
    blocks_of,
    chain_of,
    store,
)
from tests.server_process import WAIT_S, ServerProcess
from tests.stopped import stop
from tests.waiting import until

SLOTS = 64
DRAM_BYTES = SLOTS * LAYOUT.block_bytes
# Short waits, so that a silent server is noticed soon.
HASTY = TransferConfig(match_timeout_s=0.2, request_timeout_s=0.5, backoff_max_s=0.5)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvpool-") as folder:
        yield Path(folder)


@pytest.fixture(params=["host", pytest.param("ucx", marks=pytest.mark.ucx)])
def server(run_dir: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with ServerProcess(run_dir, DRAM_BYTES, "--transport", request.param) as server:
        yield server


@pytest.fixture
def watcher(server: ServerProcess) -> Iterator[RemotePool]:
    """A client that is well, to look at the server with."""
    with connect(server.run_dir, LAYOUT, WAIT_S, config=PATIENT) as pool:
        yield pool


def start_client(run_dir: Path, *job: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.faults.pool_client", str(run_dir), *job],
        stdout=subprocess.PIPE,
        text=True,
    )


def read_line(client: subprocess.Popen[str]) -> str:
    assert client.stdout is not None
    return client.stdout.readline()


def end(client: subprocess.Popen[str]) -> None:
    client.kill()
    client.wait(WAIT_S)
    assert client.stdout is not None
    client.stdout.close()


def nothing_out(pool: RemotePool) -> bool:
    """Say whether every slot is free or holds a whole block that nobody pins."""
    stats = pool.stats()
    assert stats.free + stats.ready + stats.reserved + stats.quarantined == stats.slots == SLOTS
    held = (stats.leases, stats.reserved, stats.quarantined, stats.extra["pins"])
    return held == (0, 0, 0, 0) and stats.extra["stores"] == 0


def load_all(pool: RemotePool, number: int) -> int:
    """Load what there is of a chain and check every byte; return its blocks."""
    chain, blocks = chain_of(pool, number), blocks_of(number)
    with pool.lease(pool.match(chain), WAIT_S) as lease:
        out = np.zeros((lease.blocks, LAYOUT.block_bytes), dtype=np.uint8)
        done = pool.load(lease, view_of(LAYOUT, out), deadline_s=WAIT_S)
        delivered = done.wait(WAIT_S)
    np.testing.assert_array_equal(out[:delivered], blocks[:delivered])
    return delivered


def end_of(
    completion: Completion[int] | Completion[StoreResult],
) -> int | StoreResult | KVPoolError:
    """Wait for the end and return the result, or the typed error."""
    try:
        return completion.wait(WAIT_S)
    except KVPoolError as error:
        assert completion.done(), "it has not ended within its deadline"
        return error


# ---- the server is killed or stopped ---------------------------------------------------------------


def test_the_server_is_killed_in_mid_load(run_dir: Path, server: ServerProcess) -> None:
    with connect(run_dir, LAYOUT, WAIT_S) as pool:
        assert store(pool, 1) == CHAIN_BLOCKS
        chain, blocks = chain_of(pool, 1), blocks_of(1)
        lease = pool.lease(Match(chain, CHAIN_BLOCKS), WAIT_S)
        room = [np.zeros_like(blocks) for _ in range(100)]
        loads = [pool.load(lease, view_of(LAYOUT, out), deadline_s=5) for out in room]
        server.kill()
        for out, done in zip(room, loads, strict=True):
            result = end_of(done)
            if isinstance(result, int):
                np.testing.assert_array_equal(out[:result], blocks[:result])
            else:
                assert isinstance(result, PeerUnreachableError)
        until(lambda: pool.match(chain).blocks == 0, "a match of a dead server is 0")
        with pytest.raises(PeerUnreachableError):
            pool.lease(Match(chain, 1), 1)
        dead = end_of(pool.load(lease, view_of(LAYOUT, room[0]), deadline_s=1))
        assert isinstance(dead, PeerUnreachableError)
        lease.close()
        # A new server in the same folder is found again, and is empty.
        with ServerProcess(run_dir, DRAM_BYTES, *server.flags):
            pool.wait_connected(WAIT_S)
            assert store(pool, 1) == CHAIN_BLOCKS
            assert load_all(pool, 1) == CHAIN_BLOCKS
            assert pool.stats().extra["client_losses"] == 1


def test_the_server_is_killed_in_mid_store(run_dir: Path, server: ServerProcess) -> None:
    with connect(run_dir, LAYOUT, WAIT_S) as pool:
        server.halt()
        source = view_of(LAYOUT, blocks_of(1))
        stores = [pool.store(chain_of(pool, 1), source, deadline_s=WAIT_S) for _ in range(3)]
        server.kill()
        for done in stores:
            assert isinstance(end_of(done), PeerUnreachableError)
        assert pool.match(chain_of(pool, 1)).blocks == 0
        after = end_of(pool.store(chain_of(pool, 1), source, deadline_s=WAIT_S))
        assert isinstance(after, PeerUnreachableError)
        with ServerProcess(run_dir, DRAM_BYTES, *server.flags):
            pool.wait_connected(WAIT_S)
            assert store(pool, 1) == CHAIN_BLOCKS
            assert load_all(pool, 1) == CHAIN_BLOCKS


def test_a_stopped_server_costs_one_bounded_wait(
    run_dir: Path, server: ServerProcess, watcher: RemotePool
) -> None:
    with connect(run_dir, LAYOUT, WAIT_S, config=HASTY) as pool:
        assert store(pool, 1) == CHAIN_BLOCKS
        chain = chain_of(pool, 1)
        server.halt()
        assert pool.match(chain).blocks == 0
        before = time.process_time()
        assert pool.match(chain).blocks == 0
        with pytest.raises(PeerUnreachableError, match="lately|silent"):
            pool.lease(Match(chain, 1), 1)
        assert time.process_time() - before < 1, "it must not spin"
        stuck = pool.store(chain, view_of(LAYOUT, blocks_of(1)), deadline_s=0.1)
        assert isinstance(end_of(stuck), TransferTimeoutError)
        server.signal(signal.SIGCONT)
        until(lambda: pool.match(chain).blocks == CHAIN_BLOCKS, "it is asked again")
        assert load_all(pool, 1) == CHAIN_BLOCKS
        until(lambda: nothing_out(watcher), "nothing stays out")


# ---- a client is killed or stopped -----------------------------------------------------------------


def test_a_killed_client_gives_its_leases_back(run_dir: Path, watcher: RemotePool) -> None:
    client = start_client(run_dir, "hold")
    try:
        assert read_line(client) == f"holds {CHAIN_BLOCKS}\n"
        stats = watcher.stats()
        assert (stats.leases, stats.extra["pins"]) == (1, CHAIN_BLOCKS)
    finally:
        end(client)
    until(lambda: nothing_out(watcher), "its leases are given back")
    assert watcher.stats().extra["clients"] == 1
    assert load_all(watcher, 1) == CHAIN_BLOCKS


def test_clients_killed_in_mid_store_leave_nothing_out(run_dir: Path, watcher: RemotePool) -> None:
    for _ in range(3):
        client = start_client(run_dir, "storm")
        try:
            for _ in range(5):
                assert read_line(client).startswith("stored")
        finally:
            end(client)
        until(lambda: nothing_out(watcher), "its stores are given up")
    # Every slot can be used again.
    for number in range(SLOTS // CHAIN_BLOCKS):
        assert store(watcher, number) == CHAIN_BLOCKS
        assert load_all(watcher, number) == CHAIN_BLOCKS
    assert watcher.stats().ready == SLOTS


def test_a_client_killed_while_the_server_stands_still(
    run_dir: Path, server: ServerProcess, watcher: RemotePool
) -> None:
    client = start_client(run_dir, "storm")
    try:
        assert read_line(client).startswith("stored")
        server.halt()
    finally:
        end(client)  # its request lies unread in the server's socket
    server.signal(signal.SIGCONT)
    until(lambda: nothing_out(watcher), "nothing stays out")
    assert store(watcher, 1) == CHAIN_BLOCKS
    assert load_all(watcher, 1) == CHAIN_BLOCKS


def test_a_stopped_client_harms_nobody_and_goes_on(run_dir: Path, watcher: RemotePool) -> None:
    client = start_client(run_dir, "count", "40")
    try:
        assert read_line(client) == f"stored {CHAIN_BLOCKS}\n"
        stop(client.pid)
        for number in range(1000, 1000 + 2 * SLOTS // CHAIN_BLOCKS):  # all its slots, and again
            assert store(watcher, number) == CHAIN_BLOCKS
            assert load_all(watcher, number) == CHAIN_BLOCKS
        client.send_signal(signal.SIGCONT)
        for _ in range(39):
            assert read_line(client) == f"stored {CHAIN_BLOCKS}\n"
        assert client.wait(WAIT_S) == 0
        assert load_all(watcher, 39) == CHAIN_BLOCKS
    finally:
        end(client)
    until(lambda: nothing_out(watcher), "nothing stays out")


# ---- wrong bytes -----------------------------------------------------------------------------------


def flip_a_byte(pid: int, block: bytes) -> None:
    """Change one byte of a payload in another process's shared memory."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for line in maps:
            if "memfd" not in line or " rw-s " not in line:
                continue
            begin, stop = (int(text, 16) for text in line.split()[0].split("-"))
            memory.seek(begin)
            at = memory.read(stop - begin).find(block)
            if at >= 0:
                memory.seek(begin + at + len(block) // 2)
                byte = memory.read(1)[0]
                memory.seek(begin + at + len(block) // 2)
                memory.write(bytes([byte ^ 0x10]))
                return
    raise AssertionError("the block is not in the server's memory")


def test_a_flipped_byte_is_a_miss(server: ServerProcess, watcher: RemotePool) -> None:
    assert store(watcher, 1) == CHAIN_BLOCKS
    flip_a_byte(server.pid, blocks_of(1)[5].tobytes())
    chain = chain_of(watcher, 1)
    with watcher.lease(watcher.match(chain), WAIT_S) as lease:
        out = np.zeros((CHAIN_BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
        assert watcher.load(lease, view_of(LAYOUT, out), deadline_s=WAIT_S).wait(WAIT_S) == 5
        assert watcher.match(chain).blocks == 5, "the block has left the pool"
    np.testing.assert_array_equal(out[:5], blocks_of(1)[:5])
    assert watcher.stats().corruptions == 1
    assert nothing_out(watcher)
    assert store(watcher, 1) == CHAIN_BLOCKS
    assert load_all(watcher, 1) == CHAIN_BLOCKS


def test_a_report_of_a_good_block_drops_nothing(watcher: RemotePool) -> None:
    assert store(watcher, 1) == CHAIN_BLOCKS
    chain = chain_of(watcher, 1)
    for number in range(3):
        with watcher.lease(watcher.match(chain), WAIT_S) as lease:
            out = np.zeros((CHAIN_BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
            done = watcher.load(lease, view_of(LAYOUT, out), deadline_s=0 if number < 2 else 5)
            assert isinstance(end_of(done), UnavailableError | int)
    assert watcher.match(chain).blocks == CHAIN_BLOCKS
    assert watcher.stats().corruptions == 0


# ---- garbage, and more than one client -------------------------------------------------------------


@pytest.mark.parametrize("server", ["host"], indirect=True)  # UCX's are test_ucx_endpoints.py's
def test_garbage_on_the_sockets(run_dir: Path, watcher: RemotePool) -> None:
    garbage = np.random.default_rng(7)
    kinds = {"control.sock": socket.SOCK_STREAM, "transport.sock": socket.SOCK_SEQPACKET}
    for name, kind in kinds.items():
        for size in (0, 1, 24, 4000):
            with socket.socket(socket.AF_UNIX, kind) as peer:
                peer.connect(str(run_dir / name))
                if size:
                    peer.sendall(garbage.bytes(size))
    idle = [socket.socket(socket.AF_UNIX, kind) for kind in kinds.values() for _ in range(3)]
    for number, peer in enumerate(idle):
        peer.connect(str(run_dir / list(kinds)[number // 3]))
    assert store(watcher, 1) == CHAIN_BLOCKS
    assert load_all(watcher, 1) == CHAIN_BLOCKS
    with connect(run_dir, LAYOUT, WAIT_S, config=PATIENT) as other:
        assert load_all(other, 1) == CHAIN_BLOCKS
    for peer in idle:
        peer.close()
    until(lambda: nothing_out(watcher), "nothing stays out")


def test_two_clients_share_blocks(run_dir: Path, watcher: RemotePool) -> None:
    with connect(run_dir, LAYOUT, WAIT_S, config=PATIENT) as other:
        assert store(watcher, 1) == CHAIN_BLOCKS
        assert store(other, 2) == CHAIN_BLOCKS
        assert load_all(watcher, 2) == load_all(other, 1) == CHAIN_BLOCKS
        lease = other.lease(other.match(chain_of(other, 1)), WAIT_S)
        assert watcher.stats().leases == 1
        assert watcher.stats().extra["clients"] == 2
        assert lease.blocks == CHAIN_BLOCKS
    until(lambda: watcher.stats().leases == 0, "a client that closes gives its leases back")
    assert watcher.stats().extra["clients"] == 1


def test_a_long_store_does_not_push_out_its_own_beginning(
    run_dir: Path, watcher: RemotePool
) -> None:
    few = TransferConfig(
        staging_bytes=4 * LAYOUT.block_bytes, match_timeout_s=WAIT_S, request_timeout_s=WAIT_S
    )
    for number in range(SLOTS // CHAIN_BLOCKS):
        assert store(watcher, number) == CHAIN_BLOCKS
    with connect(run_dir, LAYOUT, WAIT_S, config=few) as pool:
        chain = chain_of(pool, 99, SLOTS + 6)
        blocks = blocks_of(99, SLOTS + 6)
        done = pool.store(chain, view_of(LAYOUT, blocks), deadline_s=WAIT_S)
        result = done.wait(WAIT_S)
        assert (result.stored, result.new) == (SLOTS, SLOTS)
        assert result.refused
        assert pool.match(chain).blocks == SLOTS
        assert nothing_out(watcher)
