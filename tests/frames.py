"""Requests for fuzzing: mostly of the right kind, and of no use."""

import random
from collections.abc import Mapping, Sequence
from contextlib import suppress

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

Known = Mapping[str, Sequence[object]]

_INTEGERS = (0, 1, 2, 7, 16, 64, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, -1)
_FLOATS = (0.0, -1.0, 1.0, 1e-9, float("nan"), float("inf"), 1e300)
_TEXTS = ("", "a", "float16", "../x", "\0", "x" * 300, "\u4e2d")
_DEPTH_MAX = 4


def message(kind: type[Message], known: Known, rng: random.Random, depth: int = 0) -> Message:
    """Return a message with most fields set, at random; nested ones, too.

    Args:
        kind: What it is to be.
        known: Of some fields, by name, values that mean something to the server.
        rng: Chance.
        depth: How deep it is nested.
    """
    made = kind()
    for field in kind.DESCRIPTOR.fields:
        assert isinstance(field, FieldDescriptor)
        if rng.random() < 0.15 or depth > _DEPTH_MAX:
            continue
        for _ in range(rng.choice((0, 1, 1, 2, 16)) if field.is_repeated else 1):
            with suppress(ValueError, TypeError):  # above what the field holds
                _set(made, field, known, rng, depth)
    return made


def frame(kind: type[Message], known: Known, rng: random.Random) -> bytes:
    """Return the bytes of a message: whole, cut, longer, with some bits changed, or noise alone."""
    whole = message(kind, known, rng).SerializeToString()
    cut = whole[: rng.randrange(len(whole) + 1)]
    changed = bytearray(whole)
    for _ in range(rng.randrange(1, 4) if changed else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    noise = rng.randbytes(rng.randrange(99))
    return rng.choice([whole, whole, cut, cut + rng.randbytes(9), bytes(changed), noise])


def _set(
    made: Message, field: FieldDescriptor, known: Known, rng: random.Random, depth: int
) -> None:
    if field.message_type is not None:
        nested = message(type(_nested(made, field)), known, rng, depth + 1)
        if field.is_repeated:
            getattr(made, field.name).append(nested)
        else:
            getattr(made, field.name).CopyFrom(nested)
        return
    value: object
    match field.cpp_type:
        case _ if field.name in known and rng.random() < 0.7:
            value = rng.choice(known[field.name])
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            sizes = (0, 1, 16, 31, 32, 64, 3200)
            value = rng.randbytes(rng.choice(sizes))
        case FieldDescriptor.CPPTYPE_STRING:
            value = rng.choice(_TEXTS)
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            value = rng.choice(_FLOATS)
        case FieldDescriptor.CPPTYPE_BOOL:
            value = rng.random() < 0.5
        case _:
            value = rng.choice(_INTEGERS)
    if field.is_repeated:
        getattr(made, field.name).append(value)
    else:
        setattr(made, field.name, value)


def _nested(made: Message, field: FieldDescriptor) -> Message:
    """Return an empty message of the kind that a field holds."""
    held = getattr(type(made)(), field.name)
    nested: Message = held.add() if field.is_repeated else held
    return nested
