"""One check's outcome, and how a list of them is shown. Pure.

Who calls it: ``kvpool doctor`` and its checks.
"""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

_WIDTH: Final = 100
_NAME_WIDTH: Final = 18
_NOTHING: Final = "Nothing essential is lacking."


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What one check found.

    Attributes:
        name: Stable, dotted.
        status: ``ok``; ``warn``, it works, but slower or not as one may expect; ``lack``, it is not
            there.
        essential: Whether kvpool does not work here without it. Counts where the status is ``lack``.
        found: What is there, in words.
        remedy: What to do; empty if the status is ``ok``.
    """

    name: str
    status: Literal["ok", "warn", "lack"]
    essential: bool = False
    found: str
    remedy: str = ""


def lacking(checks: Sequence[Check]) -> list[str]:
    """Name the checks without which kvpool does not work here."""
    return [check.name for check in checks if check.essential and check.status == "lack"]


def table(checks: Sequence[Check]) -> Iterator[str]:
    """Yield the lines of a table for people, and a last one that says how it stands."""
    indent = " " * (_NAME_WIDTH + 7)
    for check in checks:
        yield from _wrapped(f"{check.status:<4}  {check.name:<{_NAME_WIDTH}} ", indent, check.found)
        if check.remedy:
            yield from _wrapped(f"{indent}-> ", f"{indent}   ", check.remedy)
    missing = lacking(checks)
    yield f"Essential and lacking: {', '.join(missing)}." if missing else _NOTHING


def _wrapped(first: str, rest: str, text: str) -> list[str]:
    # Paths and commands stay whole, to be copied.
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def size(count: int) -> str:
    """Write bytes as people do: 1536 MiB, 8 GiB."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} B"
