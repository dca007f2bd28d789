"""Names are made of the glossary's words, carry units, and the glossary tells of what exists."""

import ast
import re
from pathlib import Path

import pytest

from tests.tidy import names
from tests.tidy.mirror import ROOT
from tests.tidy.source import modules, parse, project_files

GLOSSARY = names.read_glossary(names.GLOSSARY.read_text())

# The words that DESIGN and STYLE settled; the glossary may add to them.
SETTLED = """block; part; layer slice; block hash; prefix; tier; slot; arena; replica; admit; promote;
demote; evict; lease; pin; watermark; endpoint; region; descriptor; completion; node; incarnation;
owner; virtual node; match; load; store; Conductor; prefill; decode; handoff; plan; namespace"""


def test_names() -> None:
    wrong = [
        line
        for module, path in modules().items()
        for line in names.wrong_names(module, parse(path), GLOSSARY)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("def evict_chunk(): ...", "say 'block"),
        ("class PageTable: ...", "say 'block"),
        ("free_pages = 1", "say 'block"),
        ("self.buffer_pool = 1", "say 'arena'"),
        ("def get_block(): ...", "say 'match'"),
        ("def load(swap): ...", "say 'admit"),
        ("class KVManager: ...", "say 'Conductor'"),
        ("import x as backend", "say 'tier'"),
        ("def f(cfg): ...", "write 'cfg' out"),
        ("timeout: float = 1", "unit is missing"),
        ("def f(*, poll_interval): ...", "unit is missing"),
    ],
)
def test_a_wrong_name_is_found(code: str, problem: str) -> None:
    found = list(names.wrong_names("kvpool.tiers.any", ast.parse(code), GLOSSARY))
    assert len(found) == 1, found
    assert problem in found[0]


def test_right_names_are_not() -> None:
    code = "def evict(blocks, timeout_s, block_ids): handler = backends_gone = 1\nx.get(1)\n"
    assert list(names.wrong_names("kvpool.tiers.any", ast.parse(code), GLOSSARY)) == [
        "kvpool.tiers.any:1: backends_gone: say 'tier', not 'backend'"
    ]


def test_an_exception_holds_in_its_place_only() -> None:
    tree = ast.parse("chunk = 1")
    assert not list(names.wrong_names("kvpool.integration.runtime.x", tree, GLOSSARY))
    assert list(names.wrong_names("kvpool.transfer.x", tree, GLOSSARY))


def test_exceptions_are_used() -> None:
    """An exception that nothing needs any more is deleted."""
    used: set[tuple[str, str]] = set()
    strict = names.Glossary(GLOSSARY.said, GLOSSARY.later, GLOSSARY.banned, {})
    for module, path in modules().items():
        problems = "\n".join(names.wrong_names(module, parse(path), strict))
        for word, areas in GLOSSARY.allowed.items():
            for area in areas:
                if f"{module}.".startswith(f"{area}.") and f"{word!r}" in problems:
                    used.add((word, area))
    listed = {(word, area) for word, areas in GLOSSARY.allowed.items() for area in areas}
    assert not listed - used


def test_module_names() -> None:
    wrong = [
        problem
        for path in project_files()
        if path.suffix in {".py", ".c", ".h"}
        and (problem := names.wrong_module_name(path.relative_to(ROOT)))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", ["tiers/utils.py", "kvpool/common/x.py", "index/ring_v2.py"])
def test_a_name_without_a_noun_is_found(path: str) -> None:
    assert names.wrong_module_name(Path(path))


def test_settled_words_are_defined() -> None:
    settled = {" ".join(word.split()) for word in SETTLED.split(";")}
    assert not settled - GLOSSARY.said - GLOSSARY.later
    assert len(GLOSSARY.banned) > 15


def unused(words: frozenset[str], sources: str) -> list[str]:
    """Return the words that no source uses."""
    return sorted(
        word
        for word in words
        if not re.search(word.replace(" ", r"[\s_]*"), sources, re.IGNORECASE)
    )


def test_defined_words_are_used() -> None:
    """A word of the code that is gone leaves the glossary, or moves to what is not built yet."""
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for path in (*modules().values(), *(ROOT / "native").rglob("*.[ch]"))
    )
    assert not unused(GLOSSARY.said, sources)
    assert unused(frozenset({"block", "phlogiston"}), sources) == ["phlogiston"]
