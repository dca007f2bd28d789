"""What a power cut leaves of the files of a process: the log of powercut.c, read with a seed.

Durable writes are whole. Of every other write each sector of 512 bytes is there or not, by chance; so
the last ones are torn, and any of them may have overtaken any other. Names and sizes of files are taken
for durable: a journal keeps them.
"""

import random
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("powercut.c")
SECTOR = 512
_HEAD = struct.Struct("<IIQQQ")


@dataclass(slots=True)
class Write:
    """One write to a file; ``ended`` is its place in the log, or None."""

    offset: int
    payload: bytes
    ended: int | None = None
    durable: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the log."""

    kind: str
    path: str
    identity: int
    offset: int
    payload: bytes


def build(folder: Path) -> Path:
    """Compile the library; return its path."""
    library = folder / "powercut.so"
    subprocess.run(
        ["gcc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl", "-pthread"],
        check=True,
        capture_output=True,
        text=True,
    )
    return library


def records(log: bytes) -> Iterator[Record]:
    """Read a log up to where it is cut."""
    at = 0
    while at + _HEAD.size <= len(log):
        kind, path_bytes, identity, offset, size = _HEAD.unpack_from(log, at)
        begin = at + _HEAD.size + path_bytes
        at = begin + (size if chr(kind) == "W" else 0)
        if at > len(log):
            return
        path = log[begin - path_bytes : begin].decode()
        yield Record(chr(kind), path, identity, offset, log[begin:at])


def said(log: bytes, name: str) -> list[tuple[int, bytes]]:
    """Return what was written to one file, line by line, each with its place in the log."""
    return [
        (place, record.payload)
        for place, record in enumerate(records(log))
        if record.kind == "W" and Path(record.path).name == name
    ]


def leave(log: bytes, folder: Path, into: Path, seed: int, *, until: int | None = None) -> None:
    """Write what is left of ``folder`` into ``into``: cut before place ``until`` of the log, or its end."""
    chance = random.Random(seed)
    writes: dict[str, list[Write]] = {}
    by_identity: dict[int, list[Write]] = {}
    sizes: dict[str, int] = {}
    syncs: dict[int, int] = {}
    for place, record in enumerate(records(log)):
        if place == until:
            break
        if record.kind == "W":
            write = Write(record.offset, record.payload)
            writes.setdefault(record.path, []).append(write)
            by_identity.setdefault(record.identity, []).append(write)
        elif record.kind == "E":
            for write in by_identity[record.identity]:
                write.ended = place
        elif record.kind == "S":
            syncs[record.identity] = place
        elif record.kind == "F":
            for write in writes.get(record.path, []):
                if write.ended is not None and write.ended < syncs[record.identity]:
                    write.durable = True
        else:
            sizes[record.path] = record.offset
    for name in {*writes, *sizes}:
        image = bytearray(sizes.get(name, 0))
        for write in writes.get(name, []):
            _apply(image, write, chance)
        path = into / Path(name).relative_to(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)


def _apply(image: bytearray, write: Write, chance: random.Random) -> None:
    end = write.offset + len(write.payload)
    image.extend(bytes(max(0, end - len(image))))
    if write.durable:
        image[write.offset : end] = write.payload
        return
    share = chance.choice((0.0, 0.5, 0.9, 1.0))
    for at in range(0, len(write.payload), SECTOR):
        if chance.random() < share:
            piece = write.payload[at : at + SECTOR]
            image[write.offset + at : write.offset + at + len(piece)] = piece
