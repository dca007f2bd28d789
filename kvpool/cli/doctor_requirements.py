"""Which of kvpool's requirements are met. Pure, over the lines of its package metadata.

Who calls it: the checks of ``kvpool doctor``.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

_LINE: Final = re.compile(
    r"(?P<name>[\w.-]+)(?:\[(?P<extras>[\w,-]+)\])?\s*(?P<bounds>[^;]*)(?:;(?P<marker>.*))?"
)
_EXTRA: Final = re.compile(r"extra\s*==\s*[\"']([\w-]+)[\"']")
_BOUND: Final = re.compile(r"(>=|<)\s*([\d.]+)")


def wanted(requires: Sequence[str], extra: str = "") -> Iterator[tuple[str, str]]:
    """Yield (distribution, bounds) of an extra, or of kvpool itself.

    Lines for some platforms only are left out: a check of its own knows about those.
    """
    for line in requires:
        found = _LINE.match(line)
        if found is None or "platform" in (found["marker"] or ""):
            continue
        belongs = _EXTRA.search(found["marker"] or "")
        if (belongs[1] if belongs else "") != extra:
            continue
        if found["name"] == "kvpool":
            for other in (found["extras"] or "").split(","):
                yield from wanted(requires, other)
        else:
            yield re.sub(r"[-_.]+", "-", found["name"]).lower(), found["bounds"].strip()


def unmet(requires: Sequence[str], installed: Mapping[str, str], extra: str = "") -> list[str]:
    """Say what an extra lacks, or kvpool itself: a phrase for each distribution."""
    phrases: list[str] = []
    for name, bounds in wanted(requires, extra):
        if name not in installed:
            phrases.append(f"{name} is missing")
        elif not fits(installed[name], bounds):
            phrases.append(f"{name} is {installed[name]}, not {bounds}")
    return phrases


def fits(version: str, bounds: str) -> bool:
    """Say whether a version is inside bounds such as ``>=5.19,<5.25``."""
    for relation, bound in _BOUND.findall(bounds):
        at_least = _numbers(version) >= _numbers(bound)
        if at_least != (relation == ">="):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first four numbers, so that 5.24 and 5.24.0 compare equal."""
    release = re.match(r"[\d.]*", version)
    numbers = [int(digits) for digits in re.findall(r"\d+", release[0] if release else "")]
    return tuple((*numbers, 0, 0, 0, 0)[:4])
