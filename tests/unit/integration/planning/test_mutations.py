"""Every small change of the shipped planner breaks a rule: what the rules leave open is nothing."""

import random
from types import ModuleType

import pytest

from kvpool.errors import KVPoolError
from tests.unit.integration.planning.mutation import Mutation, mutations
from tests.unit.integration.planning.rules import (
    RULES,
    Rule,
    copies_from_the_idlest,
    spreads_ties,
    starves_nobody,
)
from tests.unit.integration.planning.subject import SHIPPED, Subject, mutated, source_of

# Scenes that a mutant has to survive, for each rule. The rarest killer needed a dozen.
SCENES = 30
# These look at many decisions each, and hardly differ from scene to scene.
SLOW = (spreads_ties, starves_nobody, copies_from_the_idlest)
SLOW_SCENES = 2
# The quickest killer of most: it is asked about several scenes before the others have their turn.
FIRST_SCENES = 12
# Whatever a mutant does.
BREAKS = (
    AssertionError,
    AttributeError,
    ArithmeticError,
    KVPoolError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
)

# Changes that change nothing, and why.
EQUIVALENT = {
    # In more room, or in room that grows otherwise, lies the same.
    ("grow", "node_count >= node_room"),
    ("grow", "node_room += 2"),
    ("_make_room", "2 + hash_room"),
    ("_make_room", "2 + set_room"),
    ("grow", "3"),
    ("_make_room", "3"),
    # Where the two are equal, the wait is 0 either way.
    ("decode_wait_s", "ahead + 1 < room"),
    # Any number but 0 is as true as True.
    ("match", "2"),
    # Of a drift only the differences are used.
    ("add_prefill_worker", "1.0"),
    # True + 1 is as true.
    ("add_node", "2"),
    # Nothing is copied, so nobody asks from where.
    ("stay", "1"),
}


def breaks(rule: Rule, subject: Subject, scene: int) -> bool:
    """Tell whether a mutant breaks a rule in a scene."""
    try:
        rule(subject, random.Random(scene))
    except BREAKS:
        return True
    return False


def killed(subject: Subject, rules: list[Rule]) -> bool:
    """Tell whether a mutant breaks a rule, and put that first: its neighbours break it too."""
    if any(breaks(RULES[0], subject, scene) for scene in range(FIRST_SCENES)):
        return True
    for scene in range(SCENES):
        for rule in rules:
            if (rule not in SLOW or scene < SLOW_SCENES) and breaks(rule, subject, scene):
                rules.insert(0, rules.pop(rules.index(rule)))
                return True
    return False


def survives(module: ModuleType, mutation: Mutation, rules: list[Rule]) -> bool:
    """Tell whether a mutant keeps all rules."""
    try:
        subject = mutated(module, mutation.code)
    except BREAKS:  # it does not even load
        return False
    return not killed(subject, rules)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("module", SHIPPED, ids=lambda module: module.__name__.split(".")[-1])
def test_every_mutation_breaks_a_rule(module: ModuleType) -> None:
    rules = list(RULES)
    made = list(mutations(source_of(module), module.__name__))
    survivors = [
        str(mutation)
        for mutation in made
        if (mutation.function, mutation.node) not in EQUIVALENT
        and survives(module, mutation, rules)
    ]
    assert len(made) > 15
    assert not survivors, "\n".join(survivors)


def test_the_copy_that_is_not_mutated_survives() -> None:
    """The runner itself breaks nothing, and puts the shipped modules back."""
    before = [module.__dict__.copy() for module in SHIPPED]
    module = SHIPPED[-1]
    code = compile(source_of(module), module.__name__, "exec")
    assert not killed(mutated(module, code), list(RULES))
    assert [module.__dict__ for module in SHIPPED] == before
