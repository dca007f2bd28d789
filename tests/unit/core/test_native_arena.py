"""arena.c and window.c: a slot's life against a model, and a peer that tries to write."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool._native import ffi, lib

if TYPE_CHECKING:
    from kvpool._native import CData

SLOTS, SLOT_BYTES, CRCS = 3, 5000, 4
INCARNATION = bytes(range(16))
HASH = bytes(range(32))
DONE = ffi.new("size_t *")


def open_arena() -> "CData":
    out = ffi.new("kvp_arena **")
    assert lib.kvp_arena_open(SLOTS, SLOT_BYTES, CRCS, INCARNATION, out) == lib.KVP_OK
    return ffi.gc(out[0], lib.kvp_arena_close)


def map_window(arena: "CData", incarnation: bytes = INCARNATION) -> "CData":
    out = ffi.new("kvp_window **")
    status = lib.kvp_window_map(lib.kvp_arena_fd(arena), incarnation, out)
    assert status == lib.KVP_OK
    return ffi.gc(out[0], lib.kvp_window_close)


def one(slot: int, generation: int) -> "tuple[CData, CData, int]":
    return ffi.new("uint32_t *", slot), ffi.new("uint64_t *", generation), 1


@dataclass
class Life:
    """What the model knows of the latest life of a slot."""

    generation: int = 0
    state: str = "FREE"
    pins: int = 0
    grants: int = 0
    crcs: tuple[int, ...] = ()


class ArenaMachine(RuleBasedStateMachine):
    """Any order of calls, right or wrong, gives what the drawing in kvpool_api.h says."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = open_arena()
        self.window = map_window(self.arena)
        self.lives = [Life() for _ in range(SLOTS)]

    def change(self, step: int, slot: int, generation: int) -> int:
        status = lib.kvp_arena_change(self.arena, step, *one(slot, generation), DONE)
        assert DONE[0] == (status == lib.KVP_OK)
        return status

    def expect(self, slot: int, back: int, *states: str) -> tuple[int, int, Life | None]:
        """Return generation to name, status to expect, and the life if the call should work."""
        if slot >= SLOTS:
            return 1, lib.KVP_INVALID, None
        life = self.lives[slot]
        generation = max(life.generation - back, 0)
        if life.state == "FREE" or generation != life.generation:
            return generation, lib.KVP_STALE, None
        if life.state not in states:
            return generation, lib.KVP_BUSY, None
        return generation, lib.KVP_OK, life

    slots = st.integers(0, SLOTS)  # one past the end, too
    backs = st.sampled_from([0, 0, 0, 1])  # the latest life, or the one before

    @rule()
    def reserve(self) -> None:
        slot, generation = ffi.new("uint32_t *"), ffi.new("uint64_t *")
        taken = lib.kvp_arena_reserve(self.arena, 1, False, slot, generation)
        if all(life.state != "FREE" for life in self.lives):
            assert taken == 0
            return
        assert taken == 1
        before = self.lives[slot[0]]
        assert before.state == "FREE"
        assert generation[0] > before.generation
        self.lives[slot[0]] = Life(generation[0], "RESERVED")

    @rule(slot=slots, back=backs, crcs=st.tuples(*[st.integers(0, 2**32 - 1)] * CRCS))
    def commit(self, slot: int, back: int, crcs: tuple[int, ...]) -> None:
        generation, status, life = self.expect(slot, back, "RESERVED")
        native = ffi.new("uint32_t[]", crcs)
        assert (
            lib.kvp_arena_commit(self.arena, *one(slot, generation), HASH, native, DONE) == status
        )
        if life:
            life.state, life.crcs = "READY", crcs

    @rule(slot=slots, back=backs)
    def pin(self, slot: int, back: int) -> None:
        generation, status, life = self.expect(slot, back, "READY")
        assert self.change(lib.KVP_ARENA_PIN, slot, generation) == status
        if life:
            life.pins += 1

    @rule(slot=slots, back=backs)
    def unpin(self, slot: int, back: int) -> None:
        generation, status, life = self.expect(slot, back, "RESERVED", "READY", "QUARANTINED")
        if life and life.pins == 0:
            status, life = lib.KVP_INVALID, None
        assert self.change(lib.KVP_ARENA_UNPIN, slot, generation) == status
        if life:
            life.pins -= 1

    @rule(slot=slots, back=backs)
    def grant(self, slot: int, back: int) -> None:
        generation, status, life = self.expect(slot, back, "RESERVED", "READY")
        assert self.change(lib.KVP_ARENA_GRANT, slot, generation) == status
        if life:
            life.grants += 1

    @rule(slot=slots, back=backs)
    def settle(self, slot: int, back: int) -> None:
        generation, status, life = self.expect(slot, back, "RESERVED", "READY", "QUARANTINED")
        if life and life.grants == 0:
            status, life = lib.KVP_INVALID, None
        assert self.change(lib.KVP_ARENA_SETTLE, slot, generation) == status
        if life:
            life.grants -= 1
            if life.state == "QUARANTINED" and life.grants == 0:
                life.state = "FREE"

    @rule(slot=slots, back=backs)
    def release(self, slot: int, back: int) -> None:
        generation, status, life = self.expect(slot, back, "RESERVED", "READY")
        if life and life.pins:
            status, life = lib.KVP_BUSY, None
        assert self.change(lib.KVP_ARENA_RELEASE, slot, generation) == status
        if life:
            life.state = "QUARANTINED" if life.grants else "FREE"

    @rule(slot=slots, back=backs)
    def crcs(self, slot: int, back: int) -> None:
        generation, status, life = self.expect(slot, back, "READY")
        out = ffi.new("uint32_t[]", CRCS)
        assert lib.kvp_arena_crcs(self.arena, *one(slot, generation), out, DONE) == status
        if life:
            assert tuple(ffi.unpack(out, CRCS)) == life.crcs

    @rule(slot=slots, back=backs)
    def peer_looks(self, slot: int, back: int) -> None:
        generation, status, life = self.expect(slot, back, "READY")
        if status == lib.KVP_BUSY:
            status = lib.KVP_STALE  # a peer learns only that it may not read
        slots, lives = ffi.new("uint32_t *", slot), ffi.new("uint64_t *", generation)
        bad, out = ffi.new("size_t *"), ffi.new("uint32_t[]", CRCS)
        assert lib.kvp_window_check(self.window, slots, lives, 1, bad) == status
        assert bad[0] == (status == lib.KVP_OK)
        assert lib.kvp_window_crcs(self.window, slots, lives, 1, out, bad) == status
        if life:
            assert tuple(ffi.unpack(out, CRCS)) == life.crcs

    @invariant()
    def counts(self) -> None:
        counts = ffi.new("kvp_arena_counts *")
        lib.kvp_arena_count(self.arena, counts)
        states = [life.state for life in self.lives]
        assert counts.free == states.count("FREE")
        assert counts.reserved == states.count("RESERVED")
        assert counts.ready == states.count("READY")
        assert counts.quarantined == states.count("QUARANTINED")
        assert counts.pins == sum(life.pins for life in self.lives)
        assert counts.grants == sum(life.grants for life in self.lives)


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(deadline=None)


@pytest.fixture
def arena() -> "Iterator[CData]":
    yield open_arena()


# Prints what each attempt to write to the file came to. It also maps the memory as a peer should.
INTRUDER = """
import ctypes, mmap, os, sys
fd = int(sys.argv[1])
size = os.fstat(fd).st_size
def attempt(name, call):
    try:
        call()
        print(name, "worked")
    except OSError as error:
        print(name, "refused")
libc = ctypes.CDLL(None, use_errno=True)
def protect():
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
    at = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.mprotect(at, size, mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), "mprotect")
attempt("read", lambda: mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ))
attempt("map", lambda: mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE))
attempt("protect", protect)
attempt("write", lambda: os.pwrite(fd, b"x", size - 1))
attempt("shrink", lambda: os.ftruncate(fd, 0))
attempt("grow", lambda: os.ftruncate(fd, 2 * size))
attempt("reopen", lambda: mmap.mmap(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), size))
"""


def test_another_process_cannot_write(arena: "CData") -> None:
    fd = lib.kvp_arena_fd(arena)
    done = subprocess.run(
        [sys.executable, "-S", "-c", INTRUDER, str(fd)],
        pass_fds=[fd],
        capture_output=True,
        text=True,
        check=True,
    )
    outcomes = dict(line.split() for line in done.stdout.splitlines())
    assert outcomes.pop("read") == "worked"
    assert len(outcomes) == 6
    assert set(outcomes.values()) == {"refused"}, outcomes


def test_the_owner_writes_and_a_window_reads(arena: "CData") -> None:
    window = map_window(arena)
    stride = lib.kvp_arena_slot_stride(arena)
    assert stride == lib.kvp_window_slot_stride(window) == 8192
    assert lib.kvp_window_slot_count(window) == SLOTS
    assert lib.kvp_window_slot_bytes(window) == SLOT_BYTES
    assert lib.kvp_window_crc_count(window) == CRCS
    payload = np.random.default_rng(1).bytes(SLOT_BYTES)
    last = (SLOTS - 1) * stride
    mine = ffi.cast("uint8_t *", lib.kvp_arena_base(arena) + last)
    theirs = ffi.cast("uint8_t *", lib.kvp_window_base(window) + last)
    ffi.memmove(mine, payload, SLOT_BYTES)
    assert bytes(ffi.buffer(theirs, SLOT_BYTES)) == payload


def test_another_run_is_refused(arena: "CData") -> None:
    out = ffi.new("kvp_window **")
    status = lib.kvp_window_map(lib.kvp_arena_fd(arena), bytes(16), out)
    assert status == lib.KVP_STALE


def test_no_life_is_zero(arena: "CData") -> None:
    window = map_window(arena)
    bad = ffi.new("size_t *")
    slots, lives = ffi.new("uint32_t[1]"), ffi.new("uint64_t[1]")
    assert lib.kvp_window_check(window, slots, lives, 1, bad) == lib.KVP_STALE


@pytest.mark.parametrize(
    ("slots", "size"), [(0, 4096), (1, 0), (2**33, 1), (1, 2**64 - 1), (4, 2**62)]
)
def test_sizes_that_cannot_be(slots: int, size: int) -> None:
    out = ffi.new("kvp_arena **")
    assert lib.kvp_arena_open(slots, size, 0, INCARNATION, out) == lib.KVP_INVALID


def test_more_than_the_machine_has() -> None:
    out = ffi.new("kvp_arena **")
    assert lib.kvp_arena_open(1, 2**62, 0, INCARNATION, out) == lib.KVP_SYSTEM
    assert ffi.errno != 0
