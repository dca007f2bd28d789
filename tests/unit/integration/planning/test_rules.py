"""The shipped planner keeps every rule."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.integration.planning.rules import RULES, Rule
from tests.unit.integration.planning.subject import shipped

SUBJECT = shipped()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@given(chance=st.randoms(use_true_random=False))
def test_rule(rule: Rule, chance: random.Random) -> None:
    rule(SUBJECT, chance)
