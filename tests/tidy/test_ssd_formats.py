"""docs/formats.md tells the truth of an SSD store: its files are read by the tables, byte by byte."""

import re
from pathlib import Path

import lmdb
import numpy as np
import pytest

from kvpool.errors import FormatVersionError
from kvpool.testing.blocks import SMALL_LAYOUT, key, payload, view_of
from kvpool.tiers.ssd import SsdTier
from kvpool.tiers.tokens import TokenRows
from tests.tidy.test_formats import TEXT, crc32c, number, table

SLOTS = 3
COPY_BYTES = 4096
KEYS = key(0) + key(1)
PAYLOAD = payload(SMALL_LAYOUT, 2, seed=5)
TOKENS = TokenRows(
    np.arange(2 * SMALL_LAYOUT.block_tokens, dtype=np.uint32).reshape(2, -1),
    np.array([True, False]),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a store with a chain of two blocks, closed in order."""
    with SsdTier(tmp_path, SMALL_LAYOUT, SLOTS, threads=2, timeout_s=60) as tier:
        source = view_of(SMALL_LAYOUT, PAYLOAD)
        assert tier.write(KEYS, None, source, tokens=TOKENS, deadline_s=60) == 2
    return tmp_path


def sealed(raw: bytes) -> bool:
    """Say whether the CRC at byte 12 is of the rest."""
    return int.from_bytes(raw[12:16], "little") == crc32c(raw[:12] + bytes(4) + raw[16:])


def younger_copy(raw: bytes) -> bytes:
    copies = raw[:COPY_BYTES], raw[COPY_BYTES : 2 * COPY_BYTES]
    return max(copies, key=lambda copy: number(copy, table("superblock"), "sequence"))


def test_superblock(folder: Path) -> None:
    head, raw = table("superblock"), (folder / "store.kvp").read_bytes()
    assert len(raw) == 2 * COPY_BYTES
    copy = younger_copy(raw)
    assert sealed(copy)
    assert copy[:8] == b"KVPSTORE"
    index = (folder / "index" / "data.mdb").read_bytes()
    told = {name: number(copy, head, name) for name in head if name not in {"magic", "crc"}}
    dtype, _ = head["dtype"]
    del told["dtype"], told["store_id"]
    assert told == {
        "version": 1,
        "sequence": 2,
        "opens": 1,
        "clean": 1,
        "index_crc": told["index_crc"],
        "index_bytes": len(index),
        "slot_count": SLOTS,
        "segment_slots": SLOTS,
        "header_bytes": 4096,
        "slot_bytes": 4096 + -(-SMALL_LAYOUT.block_bytes // 4096) * 4096,
        "num_layers": SMALL_LAYOUT.num_layers,
        "kv_heads": SMALL_LAYOUT.kv_heads,
        "block_tokens": SMALL_LAYOUT.block_tokens,
        "k_dim": SMALL_LAYOUT.k_dim,
        "v_dim": SMALL_LAYOUT.v_dim,
    }
    assert copy[dtype:].rstrip(b"\0") == b"float32"
    assert told["index_crc"] == crc32c(index)


def test_slots(folder: Path) -> None:
    head, raw = table("ssd slot header"), (folder / "segment-0000.kvp").read_bytes()
    copy = younger_copy((folder / "store.kvp").read_bytes())
    size = number(copy, table("superblock"), "slot_bytes")
    assert len(raw) == SLOTS * size
    for at in range(2):
        slot = raw[at * size : (at + 1) * size]
        assert sealed(slot[:4096])
        assert slot[:8] == b"KVPSSLOT"
        assert number(slot, head, "version") == 2
        assert slot[head["store_id"][0] :][:16] == copy[table("superblock")["store_id"][0] :][:16]
        assert slot[head["hash"][0] :][:32] == key(at)
        assert slot[head["parent"][0] :][:32] == (key(0) if at else bytes(32))
        assert number(slot, head, "generation") >> 40 == 1
        assert number(slot, head, "slot") == at
        assert number(slot, head, "payload_bytes") == SMALL_LAYOUT.block_bytes
        assert number(slot, head, "crc_count") == SMALL_LAYOUT.crc_count
        found = slot[4096:][: SMALL_LAYOUT.block_bytes]
        assert found == PAYLOAD[at].tobytes()
        begin = head["payload_crc"][0]
        crcs = np.frombuffer(slot[begin : begin + 4 * SMALL_LAYOUT.crc_count], dtype="<u4")
        each = SMALL_LAYOUT.head_bytes
        for count, crc in enumerate(crcs.tolist()):
            assert crc == crc32c(found[count * each : (count + 1) * each])
        count = number(slot, head, "token_count")
        assert count == (0 if at else SMALL_LAYOUT.block_tokens)
        tokens = np.frombuffer(slot[begin + 4 * len(crcs) :][: 4 * count], dtype="<u4")
        np.testing.assert_array_equal(tokens, TOKENS.values[at][:count])
    assert not raw[2 * size :].strip(b"\0")


def test_intent(folder: Path) -> None:
    head, raw = table("write intent"), (folder / "intents.kvp").read_bytes()
    assert len(raw) == 2 * COPY_BYTES
    assert sealed(raw[:COPY_BYTES])
    assert raw[:8] == b"KVINTENT"
    assert number(raw, head, "version") == 1
    assert (number(raw, head, "sequence"), number(raw, head, "count")) == (0, SLOTS)
    begin = head["slot"][0]
    named = np.frombuffer(raw[begin : begin + 4 * SLOTS], dtype="<u4").tolist()
    assert named[:2] == [0, 1]  # the write's, and behind them those that are likely next
    assert sorted(named) == list(range(SLOTS))


def test_index(folder: Path) -> None:
    head = table("index record")
    with (
        lmdb.open(str(folder / "index"), readonly=True, lock=False) as environment,
        environment.begin() as transaction,
    ):
        records = dict(transaction.cursor())
    assert sorted(records) == [bytes(4), bytes(3) + b"\x01"]
    for at, record in enumerate(records[name] for name in sorted(records)):
        assert number(record, head, "slot") == at
        assert number(record, head, "generation") >> 40 == 1
        assert record[head["key"][0] :][:32] == key(at)
        assert record[head["parent"][0] :][:32] == (key(0) if at else bytes(32))


@pytest.mark.parametrize(
    ("title", "file", "magic"),
    [
        ("superblock", "store.kvp", "KVPSTORE"),
        ("ssd slot header", "segment-0000.kvp", "KVPSSLOT"),
        ("write intent", "intents.kvp", "KVINTENT"),
    ],
)
def test_the_text_names_magic_and_version(folder: Path, title: str, file: str, magic: str) -> None:
    raw = (folder / file).read_bytes()
    assert raw[:8] == magic.encode()
    assert f"`{magic}`" in TEXT
    (told,) = re.findall(rf"size \| {title} \|\n(?:\|.*\n)*?\| 8 \| 4 \| version: (\d+)", TEXT)
    assert number(raw, table(title), "version") == int(told)


def test_slots_of_the_version_before_are_read(folder: Path) -> None:
    """As they were written: the field at 124 was 0, and no tokens behind the checksums."""
    path = folder / "segment-0000.kvp"
    raw = bytearray(path.read_bytes())
    size = len(raw) // SLOTS
    for at in range(2):
        header = raw[at * size : at * size + COPY_BYTES]
        header[8:12] = (1).to_bytes(4, "little")
        header[124:128] = bytes(4)
        begin = 128 + 4 * SMALL_LAYOUT.crc_count
        header[begin:] = bytes(COPY_BYTES - begin)
        crc = crc32c(bytes(header[:12]) + bytes(4) + bytes(header[16:]))
        header[12:16] = crc.to_bytes(4, "little")
        raw[at * size : at * size + COPY_BYTES] = header
    path.write_bytes(raw)
    with SsdTier(folder, SMALL_LAYOUT, SLOTS, threads=2, timeout_s=60) as tier:
        slots = tier.pin(KEYS)
        out = np.zeros((2, SMALL_LAYOUT.block_bytes), dtype=np.uint8)
        rows = TokenRows.unknown(2, SMALL_LAYOUT.block_tokens)
        good, _ = tier.read(slots, view_of(SMALL_LAYOUT, out), tokens=rows, deadline_s=60)
        assert good == 2
        np.testing.assert_array_equal(out, PAYLOAD)
        assert not rows.known.any()
        tier.unpin(slots)


def test_a_store_of_another_version_is_refused_with_what_to_do(folder: Path) -> None:
    path = folder / "store.kvp"
    raw = bytearray(path.read_bytes())
    for at in (0, COPY_BYTES):
        raw[at + 8] = 2
    path.write_bytes(raw)
    with pytest.raises(FormatVersionError, match=r"version 2.*use the kvpool that wrote it"):
        SsdTier(folder, SMALL_LAYOUT, SLOTS, threads=2)
