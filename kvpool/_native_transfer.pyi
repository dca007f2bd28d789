"""What the C core has for transfers: windows, pulls, mailboxes, UCX.

A part of the types in ``_native.pyi``: at run time there is no such module.
"""

from typing import Final

from kvpool._native import CData

class TransferLib:
    """Functions and constants of ``lib`` for transfers."""

    KVP_UCX_TRIAL_BYTES: Final = 65536
    KVP_UCX_READ_AUTO: Final = 0
    KVP_UCX_READ_PUT: Final = 1
    KVP_UCX_READ_GET: Final = 2

    KVP_UCX_OPENED: Final = 1
    KVP_UCX_ARRIVED: Final = 2
    KVP_UCX_BATCH: Final = 3
    KVP_UCX_CLOSED: Final = 4
    KVP_UCX_READ: Final = 5

    # window.c
    def kvp_window_map(self, fd: int, incarnation: CData | bytes, out: CData, /) -> int: ...
    def kvp_window_close(self, window: CData, /) -> None: ...
    def kvp_window_base(self, window: CData, /) -> int: ...
    def kvp_window_slot_count(self, window: CData, /) -> int: ...
    def kvp_window_slot_bytes(self, window: CData, /) -> int: ...
    def kvp_window_slot_stride(self, window: CData, /) -> int: ...
    def kvp_window_crc_count(self, window: CData, /) -> int: ...
    def kvp_window_check(
        self, window: CData, slots: CData, generations: CData, count: int, bad: CData, /
    ) -> int: ...
    def kvp_window_crcs(
        self,
        window: CData,
        slots: CData,
        generations: CData,
        count: int,
        crcs: CData,
        bad: CData,
        /,
    ) -> int: ...

    # pull.c
    def kvp_window_pull(
        self,
        window: CData,
        crew: CData,
        shape: CData,
        layers: int,
        dst: CData,
        dst_blocks: CData,
        slots: CData,
        generations: CData,
        count: int,
        expected: CData,
        expected_stride: int,
        room: CData,
        good: CData,
        /,
    ) -> int: ...

    # mailbox.c
    def kvp_mailbox_open(
        self, record_count: int, record_bytes: int, incarnation: CData | bytes, out: CData, /
    ) -> int: ...
    def kvp_mailbox_close(self, mailbox: CData, /) -> None: ...
    def kvp_mailbox_fd(self, mailbox: CData, /) -> int: ...
    def kvp_mailbox_attach(
        self, mailbox: CData, peer_fd: int, peer_incarnation: CData | bytes, /
    ) -> int: ...
    def kvp_mailbox_push(self, mailbox: CData, payload: CData | bytes, size: int, /) -> int: ...
    def kvp_mailbox_pop(self, mailbox: CData, payload: CData, size: CData, /) -> int: ...

    # ucx_*.c
    def kvp_ucx_open(
        self, config: CData, reason: CData, reason_size: int, out: CData, /
    ) -> int: ...
    def kvp_ucx_close(self, engine: CData, /) -> None: ...
    def kvp_ucx_listen(
        self, engine: CData, port: int, timeout_ns: int, bound: CData, ucx_code: CData, /
    ) -> int: ...
    def kvp_ucx_connect(
        self,
        engine: CData,
        host: CData | bytes,
        port: int,
        expected: CData | bytes,
        timeout_ns: int,
        endpoint: CData,
        /,
    ) -> int: ...
    def kvp_ucx_disconnect(self, engine: CData, endpoint: int, /) -> int: ...
    def kvp_ucx_put(
        self,
        engine: CData,
        endpoint: int,
        spans: CData,
        count: int,
        note: CData | bytes,
        note_size: int,
        timeout_ns: int,
        cookie: int,
        /,
    ) -> int: ...
    def kvp_ucx_register(self, engine: CData, region: CData, number: CData, /) -> int: ...
    def kvp_ucx_read(
        self,
        engine: CData,
        endpoint: int,
        job: CData,
        timeout_ns: int,
        cookie: int,
        read: CData,
        /,
    ) -> int: ...
    def kvp_ucx_cancel(self, engine: CData, read: int, /) -> None: ...
    def kvp_ucx_cancel_put(self, engine: CData, endpoint: int, cookie: int, /) -> None: ...
    def kvp_ucx_end_reads(self, engine: CData, endpoint: int, /) -> None: ...
    def kvp_ucx_window_bytes(self, engine: CData, /) -> int: ...
    def kvp_ucx_windows(
        self, engine: CData, endpoint: int, free: CData, owed: CData, /
    ) -> None: ...
    def kvp_ucx_next_event(self, engine: CData, timeout_ns: int, event: CData, /) -> int: ...
    def kvp_ucx_release(self, engine: CData, endpoint: int, /) -> int: ...
    def kvp_ucx_stop_events(self, engine: CData, /) -> None: ...
    def kvp_ucx_wake_events(self, engine: CData, /) -> None: ...
    def kvp_ucx_put_protocol(self, engine: CData, text: CData, text_size: int, /) -> int: ...
    def kvp_ucx_lanes(
        self, engine: CData, endpoint: int, text: CData, text_size: int, /
    ) -> int: ...
    def kvp_ucx_count(self, engine: CData, out: CData, /) -> None: ...
    def kvp_ucx_last_warning(self, text: CData, text_size: int, /) -> int: ...
