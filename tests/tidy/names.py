"""Which names may stand in the code. The words are those of docs/glossary.md."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.tidy.mirror import ROOT
from tests.tidy.source import defined_names, value_names, words

GLOSSARY = ROOT / "docs" / "glossary.md"
LATER = "Words kept for what is not built yet"
EXCEPTIONS = "Where a banned word is right"

# A file's name says which noun it owns; these own everything and nothing.
MODULE_WORDS = frozenset(
    ("util", "common", "helper", "manager", "data", "misc", "v2", "base2", "core2", "new", "old")
)
# Long words are read faster than decoded. Allowed: kv, gpu, ssd, tp, rdma, ucx, crc, ids.
ABBREVIATIONS = frozenset(
    ("cfg", "mgr", "ctx", "buf", "msg", "req", "resp", "idx", "cnt", "addr", "conn", "ptr", "tmp")
)
# A quantity of these without a unit is a bug that waits.
NEED_UNIT = frozenset(("timeout", "interval", "delay", "duration", "latency"))


@dataclass(frozen=True)
class Glossary:
    """The glossary's tables.

    Attributes:
        said: Words to be used, of what is built.
        later: Words to be used, of what is not built yet.
        banned: Word sequences that no name may hold, each with the word to say.
        allowed: Banned word -> modules where it is right.
    """

    said: frozenset[str]
    later: frozenset[str]
    banned: dict[tuple[str, ...], str]
    allowed: dict[str, tuple[str, ...]]


def rows(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each row of each table, with the heading it stands under."""
    heading = ""
    for line in text.splitlines():
        if line.startswith("## "):
            heading = line[3:]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 3 and cells[0] not in {"say", "word"}:
            yield heading, cells


def read_glossary(text: str) -> Glossary:
    """Read the tables of a glossary."""
    said: set[str] = set()
    later: set[str] = set()
    banned: dict[tuple[str, ...], str] = {}
    allowed: dict[str, tuple[str, ...]] = {}
    for heading, (first, middle, last) in rows(text):
        if heading == EXCEPTIONS:
            for word in re.findall(r"`([^`]+)`", first):
                allowed[word] = (*allowed.get(word, ()), *re.findall(r"`([^`]+)`", middle))
            continue
        say = re.findall(r"\*\*([^*]+)\*\*", first)
        (later if heading == LATER else said).update(say)
        for word in re.findall(r"`([^`]+)`", last):
            sequence = tuple(word.split())
            banned[sequence] = " or ".join(filter(None, (banned.get(sequence), say[0])))
    return Glossary(frozenset(said), frozenset(later), banned, allowed)


def _singular(word: str) -> str:
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _within(module: str, areas: tuple[str, ...]) -> bool:
    return f"{module}.".startswith(tuple(f"{area}." for area in areas))


def wrong_names(module: str, tree: ast.AST, glossary: Glossary) -> Iterator[str]:
    """Yield every name that a module should not define, and what to say."""
    for name, line in defined_names(tree):
        found = [_singular(word) for word in words(name)]
        for sequence, say in glossary.banned.items():
            size = len(sequence)
            hit = any(tuple(found[at : at + size]) == sequence for at in range(len(found)))
            if hit and not _within(module, glossary.allowed.get(" ".join(sequence), ())):
                yield f"{module}:{line}: {name}: say {say!r}, not {' '.join(sequence)!r}"
        for word in ABBREVIATIONS.intersection(found):
            if not _within(module, glossary.allowed.get(word, ())):
                yield f"{module}:{line}: {name}: write {word!r} out"
    for name, line in value_names(tree):
        if NEED_UNIT.intersection(words(name)[-1:]):
            yield f"{module}:{line}: {name}: the unit is missing, as in {name}_s"


def wrong_module_name(path: Path) -> str | None:
    """Say what is wrong with a file's or folder's name, if anything is."""
    for part in (path.stem, path.parent.name):
        bad = MODULE_WORDS.intersection(_singular(word) for word in words(part))
        if bad:
            return f"{path}: {part!r} owns no noun: it says {sorted(bad)}"
    return None
