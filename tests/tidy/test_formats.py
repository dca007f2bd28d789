"""docs/formats.md tells the truth: live bytes are read by its tables."""

import hashlib
import os
import re
import struct

import msgspec
import numpy as np

from kvpool.arena import Arena
from kvpool.block import BlockHash, BlockLayout, Namespace, Part, new_incarnation
from kvpool.client.call_wire import CALL_BYTES_MAX, Answer, Call, cut
from kvpool.index.hashing import hash_chain
from kvpool.transfer.base import NOTIFICATION_BYTES_MAX
from kvpool.transfer.mailbox import RECORD_COUNT, Mailbox
from tests.tidy.mirror import ROOT

TEXT = (ROOT / "docs" / "formats.md").read_text()
LAYOUT = BlockLayout(num_layers=3, kv_heads=2, block_tokens=16, k_dim=5, v_dim=3)
PAGE_BYTES = 4096

Table = dict[str, tuple[int, int]]


def table(title: str, text: str = TEXT) -> Table:
    """Read one table: field -> (offset, size)."""
    (body,) = re.findall(
        rf"^\| offset \| size \| {title} \|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE
    )
    found = re.findall(r"^\| (\d+) \| (\d+) \| (\w+)", body, re.MULTILINE)
    return {name: (int(offset), int(size)) for offset, size, name in found}


def number(raw: bytes, fields: Table, name: str) -> int:
    """Read one field."""
    offset, size = fields[name]
    return int.from_bytes(raw[offset : offset + size], "little")


def rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def crc32c(data: bytes) -> int:
    """CRC-32C by the definition, a bit at a time: slow, and independent of the C core."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_crc32c_is_the_one_in_the_text() -> None:
    assert f"0x{crc32c(b'123456789'):08X}" in TEXT


def test_arena() -> None:
    incarnation = new_incarnation()
    arena = Arena(LAYOUT, 3, incarnation)
    head, slot_head = table("arena header"), table("slot header")
    raw = os.pread(arena.fd, PAGE_BYTES, 0)
    assert raw[:8] == b"VKPARENA"
    assert "`VKPARENA`" in TEXT
    assert raw[head["incarnation"][0] :][:16] == incarnation
    assert number(raw, head, "version") == 1
    assert number(raw, head, "reserved") == 0
    told = {name: number(raw, head, name) for name in list(head)[4:]}
    header_stride = rounded(40 + 4 * LAYOUT.crc_count, 64)
    slot_stride = rounded(LAYOUT.block_bytes, PAGE_BYTES)
    slots_offset = rounded(PAGE_BYTES + 3 * header_stride, PAGE_BYTES)
    assert told == {
        "slot_count": 3,
        "slot_bytes": LAYOUT.block_bytes,
        "crc_count": LAYOUT.crc_count,
        "header_stride": header_stride,
        "slot_stride": slot_stride,
        "slots_offset": slots_offset,
        "total_bytes": slots_offset + 3 * slot_stride,
    }
    assert os.fstat(arena.fd).st_size == told["total_bytes"]

    arena.reserve()
    slot = arena.reserve()
    crcs = np.arange(LAYOUT.crc_count, dtype=np.uint32).reshape(3, 2)
    name = BlockHash(bytes(range(32)))
    at = PAGE_BYTES + slot.index * header_stride
    assert number(os.pread(arena.fd, header_stride, at), slot_head, "generation") == 0
    arena.commit(slot, crcs, name)
    raw = os.pread(arena.fd, header_stride, at)
    assert number(raw, slot_head, "generation") == slot.generation
    assert raw[slot_head["hash"][0] :][:32] == name
    assert raw[slot_head["crc"][0] :][: crcs.nbytes] == crcs.tobytes()
    arena.release(slot)
    assert number(os.pread(arena.fd, header_stride, at), slot_head, "generation") == 0
    arena.close()


def test_mailbox() -> None:
    incarnations = new_incarnation(), new_incarnation()
    ours, theirs = Mailbox(incarnations[0]), Mailbox(incarnations[1])
    ours.attach(theirs.fd, incarnations[1])
    theirs.attach(ours.fd, incarnations[0])
    for payload in (b"first", b"second"):
        assert ours.push(payload)
    assert theirs.pop() == b"first"
    head, record = table("mailbox header"), table("mailbox record")
    raw, peer = os.pread(ours.fd, PAGE_BYTES, 0), os.pread(theirs.fd, PAGE_BYTES, 0)
    assert raw[:8] == b"KMAILBOX"
    assert "`KMAILBOX`" in TEXT
    assert raw[head["incarnation"][0] :][:16] == incarnations[0]
    assert number(raw, head, "version") == 1
    assert number(raw, head, "record_count") == RECORD_COUNT
    assert number(raw, head, "record_bytes") == NOTIFICATION_BYTES_MAX
    assert (number(raw, head, "pushed"), number(raw, head, "popped")) == (2, 0)
    assert (number(peer, head, "pushed"), number(peer, head, "popped")) == (0, 1)

    stride = rounded(16 + NOTIFICATION_BYTES_MAX, 64)
    raw = os.pread(ours.fd, stride, PAGE_BYTES + stride)
    size = number(raw, record, "size")
    payload = raw[record["payload"][0] :][:size]
    assert (number(raw, record, "sequence"), payload) == (2, b"second")
    assert number(raw, record, "crc") == crc32c(raw[:8] + raw[8:12] + payload)
    ours.close()
    theirs.close()


def test_calls() -> None:
    call = Call(9, "/kvpool.v1.Pool/Match", 0.5, bytes(1500))
    parts, fields = cut(9, call), table("part of a call")
    assert [number(each, fields, "number") for each in parts] == [9, 9]
    assert [number(each, fields, "index") for each in parts] == [0, 1]
    assert [number(each, fields, "count") for each in parts] == [2, 2]
    begin, size = fields["piece"]
    assert len(parts[0]) == begin + size == NOTIFICATION_BYTES_MAX
    whole = b"".join(each[begin:] for each in parts)
    assert msgspec.msgpack.decode(whole) == ["call", 9, call.method, 0.5, bytes(1500)]
    (most,) = re.findall(r"count: parts of the message, (\d+) at most", TEXT)
    room = int(most) * size
    assert len(msgspec.msgpack.encode(Answer(9, "", bytes(CALL_BYTES_MAX)))) <= room


def test_names() -> None:
    values = ("m", "w" * 64, "float32", "bfloat16", "q", "canonical-1", "a", "salt")
    names = ("model", "weights", "compute_dtype", "kv_dtype", "quantisation", "layout")
    fields = dict(zip((*names, "adapter", "salt"), values, strict=True))
    namespace = Namespace(block_tokens=16, **fields)
    texts = [text.encode() for text in ("kvpool-namespace-1", *values)]
    encoded = b"".join(struct.pack("<I", len(text)) + text for text in texts)
    digest = hashlib.sha256(encoded + struct.pack("<I", 16)).digest()
    assert namespace.digest == digest
    for order in re.findall(r"`kvpool-namespace-1`, ([^;]+);", TEXT):
        assert tuple(order.split(", ")) == (*names, "adapter", "salt")

    tokens = list(range(40))
    first = hashlib.sha256(digest + struct.pack("<16I", *tokens[:16])).digest()
    second = hashlib.sha256(first + struct.pack("<16I", *tokens[16:32])).digest()
    assert hash_chain(namespace.digest, tokens, 16) == first + second
    with_extra = hashlib.sha256(digest + struct.pack("<16I", *tokens[:16]) + b"image").digest()
    assert hash_chain(namespace.digest, tokens, 16, [b"image", b""])[:32] == with_extra

    part = Part(group=1, layer_begin=2, layer_end=3, head_begin=4, head_end=5)
    expected = hashlib.sha256(b"part" + first + struct.pack("<5I", 1, 2, 3, 4, 5)).digest()
    assert part.key(BlockHash(first)) == expected


def test_a_wrong_table_is_noticed() -> None:
    wrong = TEXT.replace("| 32 | 8 | slot_count |", "| 40 | 8 | slot_count |")
    assert table("arena header", wrong) != table("arena header")
