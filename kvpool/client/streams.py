"""Blocks over gRPC streams: for clients outside the trust domain of the other transports.

Owns how payload is cut into messages and put together again, CRC32C checked on both sides. Both
functions block. Who calls it: the client's stores and loads, and the server's service, which cut and
join in the same way.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool.block import BlockLayout
from kvpool.client import protocol
from kvpool.client.life import reply_of_store
from kvpool.client.staging import Batch, Server
from kvpool.completion import Deadline
from kvpool.errors import CorruptionError, TransferTimeoutError, UsageError
from kvpool.memory import BlockView, Crcs, Span, copy_blocks

# Bytes of blocks in one Write.
BATCH_BYTES: Final = 64 << 20


class Joined:
    """One block's payload, put together from messages that come in order. One thread.

    Args:
        layout: Of the block.
    """

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout
        self._room: NDArray[np.uint8] = np.empty(layout.block_bytes, dtype=np.uint8)
        self._at = 0
        self.block = 0
        self._crcs: Crcs | None = None

    def take(self, message: protocol.Payload) -> bool:
        """Take one message; say whether its block is whole with it.

        Raises:
            UsageError: It is not what comes next.
        """
        count = len(message.payload)
        if message.block != self.block or message.offset != self._at or not count:
            raise UsageError(
                f"bytes {message.offset} on of block {message.block} in place of bytes {self._at} on "
                f"of block {self.block}: send blocks in order, without a gap"
            )
        if self._at + count > len(self._room):
            raise UsageError(f"block {self.block} has more than {len(self._room)} bytes")
        if self._at == 0:
            self._crcs = _crcs(message.crcs, self._layout)
        self._room[self._at : self._at + count] = np.frombuffer(message.payload, dtype=np.uint8)
        self._at += count
        return self._at == len(self._room)

    def copy_to(self, dest: BlockView, crcs: Crcs | None = None) -> Crcs:
        """Copy the whole block to the one block of ``dest``, checked; then the next one may come.

        Args:
            dest: One block.
            crcs: What it must sum to, uint32 [1, layers, kv_heads]; None: what its messages said.

        Raises:
            CorruptionError: It sums to something else.
            UsageError: Neither says what it must sum to.
        """
        wanted = self._crcs if crcs is None else crcs
        if wanted is None:
            raise UsageError(f"block {self.block} came without checksums")
        source = BlockView.of_buffer(self._layout, Span.of(self._room))
        copy_blocks(dest, source, crcs=wanted)
        self.skip()
        return wanted

    def skip(self) -> None:
        """Let go of the whole block; then the next one may come."""
        self.block += 1
        self._at = 0


def cut(source: BlockView, first: int = 0, crcs: Crcs | None = None) -> Iterator[protocol.Payload]:
    """Yield blocks as messages, the first one numbered ``first``; verified if ``crcs`` are given.

    Raises:
        CorruptionError: A block does not sum to ``crcs``. Those before it were yielded.
    """
    layout = source.layout
    for index in range(len(source)):
        room = np.empty(layout.block_bytes, dtype=np.uint8)
        view = BlockView.of_buffer(layout, Span.of(room))
        known = None if crcs is None else crcs[index : index + 1]
        said = copy_blocks(view, source.take(index, index + 1), crcs=known)
        sums = (said if known is None else known).astype("<u4").tobytes()
        for begin in range(0, layout.block_bytes, protocol.PAYLOAD_BYTES_MAX):
            yield protocol.Payload(
                block=first + index,
                offset=begin,
                payload=room[begin : begin + protocol.PAYLOAD_BYTES_MAX].tobytes(),
                crcs=b"" if begin else sums,
            )


def send_stream(
    link: Server, batch: Batch, deadline: Deadline, silent_s: float
) -> protocol.StoreReply:
    """Store one batch. Raises as ``Staging.send``."""
    timeout_s = deadline.remaining_s()
    if not timeout_s:
        raise TransferTimeoutError("the deadline of the store passed before it began")

    def requests() -> Iterator[protocol.WriteRequest]:
        yield protocol.WriteRequest(
            header=protocol.StoreRequest(
                client=link.client,
                hashes=batch.hashes,
                ancestors=batch.ancestors,
                timeout_s=min(timeout_s, protocol.STORE_TIMEOUT_MAX_S),
                hold_s=batch.hold_s,
                durable=batch.durable,
            )
        )
        for payload in cut(batch.source):
            yield protocol.WriteRequest(payload=payload)

    asked = link.caller.begin_send(protocol.WRITE, requests(), timeout_s)
    return reply_of_store(link.caller, asked, silent_s)


def join(messages: Iterable[protocol.Payload], dest: BlockView) -> int:
    """Put blocks together in ``dest``; return how many leading ones came whole and verified."""
    joined = Joined(dest.layout)
    try:
        for message in messages:
            if joined.block == len(dest):
                break
            if joined.take(message):
                joined.copy_to(dest.take(joined.block, joined.block + 1))
    except (CorruptionError, UsageError):
        return joined.block
    return joined.block


def _crcs(sums: bytes, layout: BlockLayout) -> Crcs | None:
    if not sums:
        return None
    if len(sums) != 4 * layout.crc_count:
        raise UsageError(f"{len(sums)} bytes of checksums of {layout.crc_count} parts of a block")
    shape = (1, layout.num_layers, layout.kv_heads)
    return np.ascontiguousarray(np.frombuffer(sums, dtype="<u4").astype(np.uint32).reshape(shape))
