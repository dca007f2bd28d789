"""table.c against a dict."""

import hashlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool._native import ffi, lib

CAPACITY = 12
# Few names, so that they meet; more than fit, so that the table is full at times.
names = st.integers(0, 19).map(lambda number: hashlib.sha256(bytes([number])).digest())
values = st.integers(0, 2**64 - 1)


class TableMachine(RuleBasedStateMachine):
    """Any order of operations leaves what a dict would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ffi.gc(lib.kvp_table_open(CAPACITY), lib.kvp_table_close)
        self.model: dict[bytes, int] = {}

    @rule(name=names, value=values)
    def put(self, name: bytes, value: int) -> None:
        status = lib.kvp_table_put(self.table, name, value)
        if name in self.model or len(self.model) < CAPACITY:
            assert status == lib.KVP_OK
            self.model[name] = value
        else:
            assert status == lib.KVP_FULL

    @rule(asked=st.lists(names, max_size=5), value=values)
    def add(self, asked: list[bytes], value: int) -> None:
        added, numbers = ffi.new("bool[]", 5), ffi.new("uint64_t[]", [value ^ i for i in range(5)])
        run = b"".join(asked)
        status = lib.kvp_table_add(self.table, run, numbers, len(asked), added)
        if len(self.model) + len(asked) > CAPACITY:
            assert status == lib.KVP_FULL
            return
        assert status == lib.KVP_OK
        for i, name in enumerate(asked):
            assert bool(added[i]) == (name not in self.model)
            self.model.setdefault(name, value ^ i)

    @rule(asked=st.lists(names, max_size=5))
    def remove(self, asked: list[bytes]) -> None:
        found = ffi.new("uint64_t[]", 5)
        leading: list[int] = []
        for name in asked:
            if name not in self.model:
                break
            leading.append(self.model.pop(name))
        removed = lib.kvp_table_remove(self.table, b"".join(asked), len(asked), found)
        assert removed == len(leading)
        assert ffi.unpack(found, 5)[:removed] == leading

    @rule(name=names)
    def get(self, name: bytes) -> None:
        value = ffi.new("uint64_t *")
        status = lib.kvp_table_get(self.table, name, value)
        if name in self.model:
            assert (status, value[0]) == (lib.KVP_OK, self.model[name])
        else:
            assert status == lib.KVP_MISS

    @rule(asked=st.lists(names, max_size=15))
    def match(self, asked: list[bytes]) -> None:
        leading: list[int] = []
        for name in asked:
            if name not in self.model:
                break
            leading.append(self.model[name])
        found = ffi.new("uint64_t[16]")
        length = lib.kvp_table_match(self.table, b"".join(asked), len(asked), found)
        assert ffi.unpack(found, length) == leading if length else not leading
        assert lib.kvp_table_match(self.table, b"".join(asked), len(asked), ffi.NULL) == length

    @invariant()
    def count(self) -> None:
        assert lib.kvp_table_count(self.table) == len(self.model)


TestTable = TableMachine.TestCase
TestTable.settings = settings(deadline=None)


def test_no_room_for_so_many() -> None:
    assert lib.kvp_table_open(2**62) == ffi.NULL
