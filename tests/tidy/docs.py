"""What the prose promises: commands, paths, links and snippets, taken out of it."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.mirror import ROOT

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
# In code type, a name with a slash and a known ending, or a slash at its end.
_PATH = re.compile(r"`([\w.-]+(?:/[\w.-]+)*/(?:[\w.-]+\.(?:py|pyi|c|h|md|toml|txt|mk))?)`")


def documents() -> list[Path]:
    """List the documents that tell of the project as it is now."""
    tops = [ROOT / name for name in ("README.md",)]
    return tops + sorted(path for path in (ROOT / "docs").glob("*.md"))


def snippets(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return [body for kind, body in _FENCE.findall(text) if kind == language]


def make_targets(makefile: str) -> set[str]:
    """Return the commands of a Makefile that are explained in its help."""
    return set(re.findall(r"^([a-z-]+):.*##", makefile, re.MULTILINE))


def missing_targets(text: str, makefile: str) -> list[str]:
    """Return the ``make`` commands of a text that the Makefile lacks."""
    named = set(re.findall(r"(?:^|`|\s)make ([a-z-]+)\b", _code(text), re.MULTILINE))
    return sorted(named - make_targets(makefile))


def missing_commands(text: str) -> list[str]:
    """Return the commands that a text runs and that pyproject.toml does not install."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    # With a flag, or alone on a line of a fenced block; `kvpool-` also begins words on the wire.
    run = re.findall(r"^(?:\S*/)?(kvpool-[a-z]+)(?= --|$)", _code(text), re.MULTILINE)
    inline = set(re.findall(r"`(kvpool-[a-z]+)`", text))
    return sorted(set(run) - inline - set(table["project"]["scripts"]))


def flags(text: str, command: str) -> set[str]:
    """Return the flags that a text gives to a command, in code type."""
    found: set[str] = set()
    for line in _code(text).splitlines():
        for rest in re.findall(rf"\b{command}((?: [^`\n]*)?)", line):
            found.update(re.findall(r"(?<!\S)--[a-z][a-z-]*", rest))
    return found


def missing_paths(text: str, folder: Path) -> Iterator[str]:
    """Yield paths and links of a text that lead nowhere."""
    for name in _PATH.findall(text):
        if name.startswith("build/"):  # made by a command, not part of a clone
            continue
        if not (ROOT / name).exists():
            yield name
    for target in _LINK.findall(text):
        if "://" not in target and not (folder / target).exists():
            yield target


def _code(text: str) -> str:
    """Return only what stands in code type, a line each: fenced blocks and inline."""
    fenced = [body for _, body in _FENCE.findall(text)]
    inline = re.findall(r"`([^`\n]+)`", _FENCE.sub("", text))
    return "\n".join((*fenced, *inline))
