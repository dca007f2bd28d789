"""What the C core has for tiers: the ledger, and slots on a disk.

A part of the types in ``_native.pyi``: at run time there is no such module.
"""

from typing import Final

from kvpool._native import CData

class TierLib:
    """Functions and constants of ``lib`` for tiers."""

    KVP_SLOT_DONE: Final = 0
    KVP_SLOT_EMPTY: Final = 1
    KVP_SLOT_CORRUPT: Final = 2
    KVP_SLOT_OTHER: Final = 3
    KVP_SLOT_VERSION: Final = 4
    KVP_SLOT_FAILED: Final = 5
    KVP_SLOT_LATE: Final = 6
    KVP_SLOT_SKIPPED: Final = 7
    KVP_SLOT_SOURCE: Final = 8

    KVP_SSD_INTENT_BYTES: Final = 4096
    KVP_SSD_INTENT_SLOTS: Final = 1000
    KVP_SSD_SEGMENTS_MAX: Final = 1024

    # ledger.c, ledger_list.c, ledger_range.c
    def kvp_ledger_open(self, slot_count: int, first_generation: int, out: CData, /) -> int: ...
    def kvp_ledger_close(self, ledger: CData, /) -> None: ...
    def kvp_ledger_hold(self, ledger: CData, /) -> None: ...
    def kvp_arena_keep(self, arena: CData, ledger: CData, /) -> int: ...
    def kvp_ledger_reserve(
        self, ledger: CData, count: int, grant: bool, slots: CData, generations: CData, /
    ) -> int: ...
    def kvp_ledger_take(
        self,
        ledger: CData,
        count: int,
        grant: bool,
        slots: CData,
        generations: CData,
        evicted: CData,
        gone: CData,
        /,
    ) -> int: ...
    def kvp_ledger_ahead(self, ledger: CData, count: int, slots: CData, /) -> int: ...
    def kvp_ledger_evict(self, ledger: CData, count: int, slots: CData, /) -> int: ...
    def kvp_ledger_vacate(
        self, ledger: CData, first: int, count: int, generations: CData, gone: CData, /
    ) -> int: ...
    def kvp_ledger_commit(
        self,
        ledger: CData,
        slots: CData,
        generations: CData,
        keys: CData | bytes,
        parents: CData | bytes,
        count: int,
        added: CData,
        bad: CData,
        /,
    ) -> int: ...
    def kvp_ledger_commit_run(
        self,
        ledger: CData,
        slots: CData,
        generations: CData,
        keys: CData | bytes,
        parent: CData | bytes,
        count: int,
        granted: bool,
        added: CData,
        at: CData,
        /,
    ) -> int: ...
    def kvp_ledger_restore(
        self,
        ledger: CData,
        slots: CData,
        generations: CData,
        keys: CData | bytes,
        parents: CData | bytes,
        count: int,
        kept: CData,
        /,
    ) -> None: ...
    def kvp_ledger_match(self, ledger: CData, keys: CData | bytes, count: int, /) -> int: ...
    def kvp_ledger_rooted(self, ledger: CData, keys: CData | bytes, count: int, /) -> int: ...
    def kvp_ledger_touch(
        self, ledger: CData, keys: CData | bytes, count: int, here: CData, /
    ) -> None: ...
    def kvp_ledger_pin(
        self, ledger: CData, keys: bytes, count: int, use: bool, slots: CData, lives: CData, /
    ) -> int: ...
    def kvp_ledger_drop(self, ledger: CData, key: CData | bytes, slot: CData, /) -> int: ...
    def kvp_ledger_change(
        self, ledger: CData, step: int, slots: CData, generations: CData, count: int, done: CData, /
    ) -> int: ...
    def kvp_ledger_names(
        self,
        ledger: CData,
        slots: CData,
        generations: CData,
        count: int,
        keys: CData,
        parents: CData,
        ready: CData,
        /,
    ) -> None: ...
    def kvp_ledger_list(
        self,
        ledger: CData,
        next: CData,
        count: int,
        slots: CData,
        generations: CData,
        keys: CData,
        parents: CData,
        /,
    ) -> int: ...
    def kvp_ledger_stale(self, ledger: CData, count: int, slots: CData, /) -> int: ...
    def kvp_ledger_mark(self, ledger: CData, slots: CData, count: int, stale: bool, /) -> None: ...
    def kvp_ledger_count(self, ledger: CData, out: CData, /) -> None: ...

    # ssd.c, ssd_io.c, ssd_slot.c
    def kvp_ssd_open(
        self,
        geometry: CData,
        fds: CData,
        fd_count: int,
        intent_fd: int,
        lock_fd: int,
        out: CData,
        /,
    ) -> int: ...
    def kvp_ssd_stop(self, ssd: CData, /) -> None: ...
    def kvp_ssd_close(self, ssd: CData, timeout_ns: int, /) -> None: ...
    def kvp_ssd_forget(self, ssd: CData, /) -> None: ...
    def kvp_ssd_read(
        self,
        ssd: CData,
        slots: CData,
        generations: CData,
        keys: CData | bytes,
        count: int,
        dst: CData,
        dst_blocks: CData,
        timeout_ns: int,
        crcs: CData,
        tokens: CData,
        known: CData,
        results: CData,
        error: CData,
        /,
    ) -> int: ...
    def kvp_ssd_write(
        self,
        ssd: CData,
        slots: CData,
        generations: CData,
        keys: CData | bytes,
        parents: CData | bytes,
        count: int,
        also: int,
        src: CData,
        src_blocks: CData,
        crc_expected: CData,
        tokens: CData,
        known: CData,
        timeout_ns: int,
        results: CData,
        error: CData,
        /,
    ) -> int: ...
    def kvp_ssd_erase(
        self, ssd: CData, slots: CData, count: int, timeout_ns: int, results: CData, error: CData, /
    ) -> int: ...
    def kvp_ssd_scan(
        self,
        ssd: CData,
        slots: CData,
        count: int,
        whole: bool,
        timeout_ns: int,
        keys: CData,
        parents: CData,
        generations: CData,
        tokens: CData,
        known: CData,
        results: CData,
        error: CData,
        /,
    ) -> int: ...
    def kvp_ssd_settled(
        self, ssd: CData, count: int, slots: CData, generations: CData, /
    ) -> int: ...
    def kvp_ssd_named(self, ssd: CData, slots: CData, count: int, /) -> bool: ...
    def kvp_ssd_late(self, ssd: CData, /) -> int: ...
    def kvp_ssd_intent_slots(
        self, page: CData | bytes, size: int, store_id: CData | bytes, count: int, slots: CData, /
    ) -> int: ...
