"""Run a suite against an implementation with a planted bug, to prove that the suite can fail."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import pytest

from kvpool.errors import KVPoolError

T = TypeVar("T")


def failing_tests(suite: object, fresh: Callable[[], AbstractContextManager[T]]) -> list[str]:
    """Call every ``test_*`` method of ``suite`` with a fresh subject; name those that fail."""
    failing: list[str] = []
    for name in dir(suite):
        if not name.startswith("test_"):
            continue
        test: Callable[[T], None] = getattr(suite, name)
        with fresh() as subject:
            try:
                test(subject)
            except (AssertionError, KVPoolError, pytest.fail.Exception):
                failing.append(name)
    return failing
