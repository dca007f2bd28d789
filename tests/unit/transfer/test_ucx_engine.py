"""The UCX engine against another one in the same process."""

import contextlib
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from kvpool.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    PeerUnreachableError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.memory import Span
from kvpool.transfer.ucx_connection import UcxConnection
from kvpool.transfer.ucx_engine import UcxEngine
from kvpool.transfer.ucx_library import find_library

pytestmark = pytest.mark.ucx

PART = 1 << 20
WAIT_S = 20.0


@dataclass
class Pair:
    """A client's endpoint, and what its server saw."""

    client: UcxEngine
    server: UcxEngine
    endpoint: UcxConnection
    accepted: UcxConnection
    notes: list[bytes] = field(default_factory=list)
    arrived: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def hear(self, note: bytes) -> None:
        self.notes.append(note)
        self.arrived.release()


def span_of(size: int, value: int = 0) -> Span:
    return Span.of(np.full(size, value, dtype=np.uint8))


def pages(size: int) -> Span:
    return Span.of(np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8))


@pytest.fixture
def pair() -> Iterator[Pair]:
    accepted: list[UcxConnection] = []
    came = threading.Event()

    def accept(endpoint: UcxConnection) -> None:
        accepted.append(endpoint)
        came.set()

    with (
        UcxEngine(inbox=pages(2 * PART), endpoint_max=2) as server,
        UcxEngine(endpoint_max=2, batch_max=4) as client,
    ):
        port = server.listen(accept)
        endpoint = client.connect("127.0.0.1", port, WAIT_S, server.incarnation)
        assert came.wait(WAIT_S)
        pair = Pair(client, server, endpoint, accepted[0])
        pair.accepted.on_notification(pair.hear)
        yield pair


def test_both_sides_know_each_other(pair: Pair) -> None:
    assert pair.endpoint.peer == pair.server.incarnation
    assert pair.accepted.peer == pair.client.incarnation
    assert pair.endpoint.peer_inbox_bytes == PART
    assert pair.accepted.peer_inbox_bytes == 0
    assert pair.endpoint.inbox is None
    assert pair.accepted.inbox is not None
    assert pair.accepted.inbox.size == PART


def test_bytes_are_there_when_the_note_is(pair: Pair) -> None:
    batch = [(span_of(100, value), 1000 - value * 100) for value in range(1, 4)]
    assert pair.endpoint.put(batch, WAIT_S, b"three").wait(WAIT_S) == 300
    assert pair.arrived.acquire(timeout=WAIT_S)
    assert pair.notes == [b"three"]
    assert pair.accepted.inbox is not None
    landed = bytes(pair.accepted.inbox.view()[700:1000])
    assert landed == b"\3" * 100 + b"\2" * 100 + b"\1" * 100


def test_a_table_is_a_batch(pair: Pair) -> None:
    source = span_of(64, 9)
    table = np.array([[source.address, 64, 128]], dtype=np.uint64)
    assert pair.endpoint.put(table, WAIT_S, b"t").wait(WAIT_S) == 64
    assert pair.arrived.acquire(timeout=WAIT_S)
    assert pair.accepted.inbox is not None
    assert bytes(pair.accepted.inbox.view()[127:193]) == b"\0" + b"\t" * 64 + b"\0"


def test_notes_keep_their_order_and_go_both_ways(pair: Pair) -> None:
    came: list[bytes] = []
    back = threading.Semaphore(0)

    def hear(note: bytes) -> None:
        came.append(note)
        back.release()

    pair.endpoint.on_notification(hear)
    for i in range(200):
        pair.endpoint.put([(span_of(8, i), 0)] if i % 2 else [], WAIT_S, b"%d" % i).wait(WAIT_S)
        assert pair.arrived.acquire(timeout=WAIT_S)
        assert pair.accepted.notify(b"%d" % i)
        assert back.acquire(timeout=WAIT_S)
    assert pair.notes == came == [b"%d" % i for i in range(200)]


def test_notes_before_the_callback_are_kept(pair: Pair) -> None:
    for note in (b"1", b"2"):
        pair.accepted.put([], WAIT_S, note).wait(WAIT_S)
    came: list[bytes] = []
    both = threading.Semaphore(0)

    def hear(note: bytes) -> None:
        came.append(note)
        both.release()

    pair.endpoint.on_notification(hear)
    assert both.acquire(timeout=WAIT_S)
    assert both.acquire(timeout=WAIT_S)
    assert came == [b"1", b"2"]


def test_a_peer_that_takes_no_notes_is_not_flooded(pair: Pair) -> None:
    hold, held = threading.Event(), threading.Event()

    def stall(note: bytes) -> None:
        held.set()
        hold.wait(WAIT_S)

    pair.accepted.on_notification(stall)
    try:
        sent = 0
        while pair.endpoint.notify(b"x"):
            sent += 1
            assert sent <= 200
            while pair.client.counts()["batches"]:
                pass
        assert held.wait(WAIT_S)
        assert sent <= 66  # a window, and the one note that the callback has
    finally:
        hold.set()


@pytest.mark.parametrize(
    "batch",
    [
        [(Span(4096, 2), PART - 1)],
        [(Span(4096, 1), PART)],
        [(Span(4096, PART + 1), 0)],
        [(Span(4096, 1), -1)],
        [(Span(4096, 0), 0)],
        [(Span(4096, 2), 2**64 - 1)],
        [(Span(2**64 - 8, 16), 0)],
        [(Span(4096, 16), 32), (Span(8192, 16), 33)],
        [(Span(4096, 16), 8)],
        [(Span(4096, 1), at) for at in range(64, 100_000)],
        [(Span(4096, 0.5), 0)],  # type: ignore[arg-type]
        np.zeros((1, 2), dtype=np.uint64),
        np.zeros((1, 3), dtype=np.int64),
    ],
    ids=[
        *("end", "past", "large", "before", "empty", "wrap", "local", "overlap", "same", "many"),
        *("fraction", "columns", "dtype"),
    ],
)
def test_a_wrong_span_is_refused_before_anything_moves(pair: Pair, batch: object) -> None:
    good = (span_of(16, 7), 0)
    wrong = [good, *batch] if isinstance(batch, list) else batch
    with pytest.raises(UsageError):
        pair.endpoint.put(wrong, WAIT_S, b"never")  # type: ignore[arg-type]
    assert pair.endpoint.put([], WAIT_S, b"next").wait(WAIT_S) == 0
    assert pair.arrived.acquire(timeout=WAIT_S)
    assert pair.notes == [b"next"]
    assert pair.accepted.inbox is not None
    assert bytes(pair.accepted.inbox.view()[:16]) == bytes(16)


def test_nothing_to_do_and_large_notes_are_refused(pair: Pair) -> None:
    for note in (b"", bytes(1089)):
        with pytest.raises(UsageError):
            pair.endpoint.put([], WAIT_S, note)
    assert pair.endpoint.put([], WAIT_S, bytes(1088)).wait(WAIT_S) == 0


def test_a_passed_deadline_closes_the_connection(pair: Pair) -> None:
    late = pair.endpoint.put([(span_of(64), 0)], 0.0)
    with pytest.raises(TransferTimeoutError):
        late.wait(WAIT_S)
    with pytest.raises(PeerUnreachableError):
        pair.endpoint.put([(span_of(64), 0)], WAIT_S)


def test_close_runs_what_was_posted() -> None:
    """Such as the begin of a write, whose completion nobody else would end."""
    engine = UcxEngine()
    held, go, ran = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go.wait(WAIT_S)

    assert engine.post(hold)
    assert held.wait(WAIT_S)
    assert engine.post(ran.set)
    closer = threading.Thread(target=engine.close)
    closer.start()
    while engine.post(lambda: None):  # until the engine takes no more
        time.sleep(0.001)
    go.set()
    closer.join(WAIT_S)
    assert ran.is_set()


def test_close_tells_both_sides(pair: Pair) -> None:
    lost: list[UcxConnection] = []
    both = threading.Semaphore(0)

    def note_lost(endpoint: UcxConnection) -> None:
        lost.append(endpoint)
        both.release()

    pair.endpoint.on_lost(note_lost)
    pair.accepted.on_lost(note_lost)
    pair.endpoint.close()
    pair.endpoint.close()
    assert both.acquire(timeout=WAIT_S)
    assert both.acquire(timeout=WAIT_S)
    assert set(lost) == {pair.endpoint, pair.accepted}
    assert not pair.endpoint.alive()
    with pytest.raises(ClosedError):
        pair.endpoint.put([(span_of(64), 0)], WAIT_S)
    with pytest.raises(PeerUnreachableError):
        pair.accepted.notify(b"x")
    pair.endpoint.on_lost(note_lost)  # at once
    assert len(lost) == 3


def test_closing_a_transport_ends_what_is_in_flight(pair: Pair) -> None:
    large = span_of(PART)
    batches = [pair.endpoint.put([(large, 0)], WAIT_S) for _ in range(4)]
    with pytest.raises(CapacityError):
        for _ in range(100):
            batches.append(pair.endpoint.put([(large, 0)], WAIT_S))
    pair.client.close()
    pair.client.close()
    for batch in batches:
        assert batch.done()
        try:
            assert batch.result() == PART
        except ClosedError:
            pass
    with pytest.raises(ClosedError):
        pair.endpoint.put([(large, 0)], WAIT_S)
    with pytest.raises(ClosedError):
        pair.client.connect("127.0.0.1", pair.server.port, WAIT_S)


def test_connections_are_limited_on_both_sides(pair: Pair) -> None:
    with UcxEngine(endpoint_max=2) as client:
        client.connect("127.0.0.1", pair.server.port, WAIT_S)
        with pytest.raises(PeerUnreachableError):  # the server has two slots, both in use
            client.connect("127.0.0.1", pair.server.port, WAIT_S)
    pair.client.connect("127.0.0.1", pair.server.port, WAIT_S)
    with pytest.raises(CapacityError):
        pair.client.connect("127.0.0.1", pair.server.port, WAIT_S)


def test_callbacks_cannot_wait_for_their_own_thread(pair: Pair) -> None:
    errors: list[Exception] = []
    done = threading.Event()

    def misuse(note: bytes) -> None:
        for call in (
            pair.server.close,
            lambda: pair.server.connect("127.0.0.1", pair.server.port, WAIT_S),
        ):
            try:
                call()
            except UsageError as error:
                errors.append(error)
        done.set()

    pair.accepted.on_notification(misuse)
    pair.endpoint.notify(b"x")
    assert done.wait(WAIT_S)
    assert len(errors) == 2


def test_a_forked_child_is_refused(pair: Pair) -> None:
    child = os.fork()
    if child == 0:
        try:
            pair.endpoint.put([(span_of(8), 0)], WAIT_S)
        except (ClosedError, PeerUnreachableError):
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pair.endpoint.put([(span_of(8), 0)], WAIT_S).wait(WAIT_S) == 8


def test_idle_transports_sleep() -> None:
    with UcxEngine(heartbeat_interval_s=0) as transport:
        transport.listen(lambda endpoint: None)
        before = transport.counts()["wakeups"]
        assert not threading.Event().wait(0.2)
        assert transport.counts()["wakeups"] - before <= 2


def cpu_ns(threads: set[str]) -> int:
    """Return what threads have had of a CPU; those that have ended count nothing."""
    total = 0
    for thread in threads:
        with contextlib.suppress(FileNotFoundError):
            total += int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0])
    return total


def test_an_idle_connection_with_a_heartbeat_sleeps() -> None:
    """Ten times as many beats as by default: a thread that polls takes what the machine has."""
    others = set(os.listdir("/proc/self/task"))
    with (
        UcxEngine(heartbeat_interval_s=0.1) as server,
        UcxEngine(heartbeat_interval_s=0.1) as client,
    ):
        connection = client.connect("127.0.0.1", server.listen(lambda connection: None), WAIT_S)
        ours = set(os.listdir("/proc/self/task")) - others
        begin, before = time.monotonic_ns(), cpu_ns(ours)
        assert not threading.Event().wait(1.0)
        elapsed, used = time.monotonic_ns() - begin, cpu_ns(ours) - before
        assert connection.alive()
        assert used < elapsed / 20, f"{used} ns of {elapsed}"


def test_listening_twice_and_taken_ports_are_refused(pair: Pair) -> None:
    with pytest.raises(UsageError, match="already"):
        pair.server.listen(lambda endpoint: None)
    with pytest.raises(UsageError, match="port"):
        pair.client.listen(lambda endpoint: None, pair.server.port)


@pytest.mark.parametrize("host", ["0.0.0.0", "203.0.113.1", "::"])
def test_only_loopback_unless_trusted(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        UcxEngine(host=host)
    assert caught.value.key == "transfer.trusted_network"


@pytest.mark.parametrize(
    "settings",
    [
        {"host": "localhost"},
        {"host": "203.0.113.1", "trusted_network": True},
        {"host": "::", "trusted_network": True},
        {"endpoint_max": 0},
        {"batch_max": 0},
        {"heartbeat_interval_s": 2.0, "heartbeat_timeout_s": 3.0},
        {"spin_s": -1.0},
        {"inbox": Span(4096, 4096), "endpoint_max": 2},
    ],
    ids=str,
)
def test_wrong_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        UcxEngine(**settings)  # type: ignore[arg-type]


def test_addresses_of_another_family_are_refused(pair: Pair) -> None:
    for host in ("::1", "localhost", ""):
        with pytest.raises(UsageError):
            pair.client.connect(host, pair.server.port, WAIT_S)


def test_ipv6_loopback() -> None:
    with UcxEngine(host="::1", inbox=pages(PART), endpoint_max=1) as server:
        port = server.listen(lambda endpoint: None)
        with UcxEngine(host="::1") as client:
            endpoint = client.connect("::1", port, WAIT_S)
            assert endpoint.put([(span_of(4096), 0)], WAIT_S).wait(WAIT_S) == 4096


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_library_is_found_without_loading_it() -> None:
    said = run(
        "import sys; from kvpool.transfer.ucx_library import find_library; print(find_library());"
        "print('libucx' in sys.modules, 'libucp' in open('/proc/self/maps').read())"
    )
    path, state = said.splitlines()
    assert path.endswith("libucp.so")
    assert state == "False False"
    assert find_library("anything") == "anything"


def test_a_library_that_is_mapped_already_is_used() -> None:
    said = run(
        "import libucx; kept = libucx.load_library()\n"
        "from kvpool.transfer.ucx_engine import UcxEngine\n"
        "with UcxEngine() as t: print(t.library)\n"
        "print(len({l.split()[-1] for l in open('/proc/self/maps') if 'libucp' in l}))"
    )
    path, copies = said.splitlines()
    assert path.endswith("libucp.so")
    assert copies == "1"


def test_a_missing_library_is_a_setting_to_fix() -> None:
    said = run(
        "from kvpool.errors import ConfigError\n"
        "from kvpool.transfer.ucx_engine import UcxEngine\n"
        "try: UcxEngine(library='/nowhere/libucp.so')\n"
        "except ConfigError as error: print(error)"
    )
    assert "/nowhere/libucp.so" in said


def test_nothing_is_written_to_stdout() -> None:
    """UCX logs there; one that is asked to warn does so through us."""
    said = run(
        "from kvpool.transfer.ucx_engine import UcxEngine\n"
        "t = UcxEngine(); t.listen(lambda e: None); u = UcxEngine()\n"
        "try: u.listen(lambda e: None, t.port)\n"
        "except Exception: pass\n"
        "u.close(); t.close()"
    )
    assert said == ""
