"""The library reads no environment, sets up no logging, unpickles nothing, swallows nothing."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tidy import library
from tests.tidy.source import modules, parse, project_files, shown

Rule = Callable[[ast.AST], Iterator[str]]

# Entry points, where a process is set up: they may print, set logging up and read the environment.
COMMANDS = (
    "kvpool.cli",
    "kvpool.server.main",
    "kvpool.server.daemon",
    "kvpool.integration.serve",
    "kvpool.integration.runtime.worker",
)
# The suites are tests.
SUITES = ("kvpool.testing",)

# Rule, modules it does not hold for, code that breaks it.
RULES: list[tuple[Rule, tuple[str, ...], str]] = [
    (library.reads_environment, ("kvpool.cli",), "import os\nx = os.environ.get('A')"),
    (library.reads_environment, ("kvpool.cli",), "from os import getenv"),
    (library.formats_log_eagerly, (), "logger.info(f'{x} blocks')"),
    (library.formats_log_eagerly, (), "self._logger.log(10, 'blocks ' + x)"),
    (library.sets_up_logging, COMMANDS, "import logging\nlogging.basicConfig()"),
    (library.sets_up_logging, COMMANDS, "logger.setLevel(10)"),
    (library.sets_up_logging, COMMANDS, "logging.getLogger('kvpool')"),
    (library.prints, COMMANDS, "print('hello')"),
    (library.unpickles, (), "import pickle"),
    (library.unpickles, (), "exec('x = 1')"),
    (library.unpickles, (), "load(path, trust_remote_code=True)"),
    (library.catches_everything, (), "try:\n    f()\nexcept:\n    g()"),
    (library.catches_everything, (), "try:\n    f()\nexcept Exception:\n    pass"),
    (library.works_in_assert, SUITES, "assert queue.pop() is not None"),
    (library.raises_foreign, (*SUITES, *COMMANDS), "raise RuntimeError('no')"),
]


@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, _, _ in RULES))
def test_library(rule: Rule) -> None:
    exempt = next(names for known, names, _ in RULES if known is rule)
    wrong = [
        f"{shown(path)}:{line}"
        for module, path in modules().items()
        if not f"{module}.".startswith(tuple(f"{name}." for name in exempt))
        for line in rule(parse(path))
    ]
    assert not wrong, f"{rule.__doc__}\n" + "\n".join(wrong)


@pytest.mark.parametrize(("rule", "planted"), [(rule, code) for rule, _, code in RULES])
def test_a_violation_is_found(rule: Rule, planted: str) -> None:
    assert list(rule(ast.parse(planted)))


def test_an_ordinary_module_breaks_no_rule() -> None:
    tree = ast.parse(
        "import logging\nlogger = logging.getLogger(__name__)\nlogger.info('%s blocks', 3)\n"
        "try:\n    f()\nexcept Exception:\n    logger.exception('f failed')\n    raise\n"
    )
    assert [line for rule, _, _ in RULES for line in rule(tree)] == []


def not_ascii(path: Path) -> list[str]:
    """Return the lines of a file that hold anything but plain ASCII."""
    lines = path.read_bytes().splitlines()
    return [f"{shown(path)}:{at}" for at, line in enumerate(lines, 1) if not line.isascii()]


def test_text_is_ascii() -> None:
    wrong = [line for path in project_files() for line in not_ascii(path)]
    assert not wrong, "\n".join(wrong)


def test_other_text_is_found(tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text("a = 1\nb = '\N{LATIN SMALL LETTER E WITH ACUTE}'\n", encoding="utf-8")
    assert not_ascii(path) == [f"{path}:2"]


def machine_paths(text: str) -> list[str]:
    """Return what a text names that exists on one machine only."""
    return re.findall(r"(?<![\w.])/(?:root|work|home/\w+)/[\w./-]*", text)


def test_no_path_of_a_machine() -> None:
    wrong = [
        f"{shown(path)}: {name}"
        for path in project_files()
        for name in machine_paths(path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)
    planted = f"/{'home'}/me/kvpool"
    assert machine_paths(f"see {planted} and build/work/x") == [planted]
