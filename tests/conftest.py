"""Settings of every test run: how often property and fault tests repeat."""

import os
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

# Examples of a property test: so many that the whole run stays short, or as many as a night allows.
NORMAL_EXAMPLES = 50
SOAK_EXAMPLES = 2000

Count = Callable[[int, int], int]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak", action="store_true", help="repeat property and fault tests many times more"
    )


def pytest_configure(config: pytest.Config) -> None:
    # No deadline: the machine's speed must not decide a test. CI draws the same examples each time,
    # so that a red build is the change's fault; everywhere else, and in a soak, they are new ones.
    soaks: bool = config.getoption("--soak")
    hypothesis.settings.register_profile(
        "kvpool",
        deadline=None,
        derandomize="CI" in os.environ and not soaks,
        max_examples=SOAK_EXAMPLES if soaks else NORMAL_EXAMPLES,
        print_blob=True,
    )
    hypothesis.settings.load_profile("kvpool")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files named ``*_soak.py`` to a soak: they take minutes, and quicker ones are beside them."""
    soaks: bool = config.getoption("--soak")
    return True if collection_path.name.endswith("_soak.py") and not soaks else None


@pytest.fixture(scope="session")
def count(pytestconfig: pytest.Config) -> Count:
    """Choose between two counts: ``count(5, 500)`` is 5, and 500 with ``--soak``."""
    soaks: bool = pytestconfig.getoption("--soak")
    return lambda normal, soak: soak if soaks else normal
