"""The shipped planner, or a mutated copy of it, as modules to test."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.abc import InspectLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import kvpool.integration.conductor as package
from kvpool.integration.conductor import (
    block_index,
    cluster,
    cost,
    decode_choice,
    patience,
    planner,
    prefill_choice,
)
from tests.unit.integration.planning.mutation import STEP, stepper

# In the order in which they import each other.
SHIPPED: tuple[ModuleType, ...] = (
    block_index,
    cluster,
    cost,
    prefill_choice,
    decode_choice,
    planner,
    patience,
)


@dataclass(frozen=True)
class Subject:
    """What the rules are asked of. The types are those of the shipped modules."""

    Cluster: type[cluster.Cluster]
    BlockIndex: type[block_index.BlockIndex]
    ProfiledCost: type[cost.ProfiledCost]
    Planner: type[planner.Planner]
    PlannerOptions: type[planner.PlannerOptions]
    PatientPlanner: type[patience.PatientPlanner]
    PatienceOptions: type[patience.PatienceOptions]
    draw: Callable[[int, int, int], int]


def source_of(module: ModuleType) -> str:
    """Read the file that ships."""
    assert module.__file__ is not None
    return Path(module.__file__).read_text()


def _subject(modules: Mapping[str, Any]) -> Subject:
    return Subject(
        Cluster=modules["cluster"].Cluster,
        BlockIndex=modules["block_index"].BlockIndex,
        ProfiledCost=modules["cost"].ProfiledCost,
        Planner=modules["planner"].Planner,
        PlannerOptions=modules["planner"].PlannerOptions,
        PatientPlanner=modules["patience"].PatientPlanner,
        PatienceOptions=modules["patience"].PatienceOptions,
        draw=modules["prefill_choice"].draw,
    )


def shipped() -> Subject:
    """Return the planner as it ships."""
    return _subject({_short(module): module for module in SHIPPED})


class _Compiled(InspectLoader):
    """Loads a module from code that is compiled already."""

    def __init__(self, code: CodeType) -> None:
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        return self._code

    def get_source(self, fullname: str) -> None:
        return None


def mutated(module: ModuleType, code: CodeType) -> Subject:
    """Return the planner with one module replaced by ``code``, and all of them loaded again.

    The copies live beside the shipped modules, which stay as they are.
    """
    copies: dict[str, ModuleType] = {}
    try:
        for original in SHIPPED:
            loader = _Compiled(code if original is module else _compiled(original))
            spec = spec_from_loader(original.__name__, loader)
            assert spec is not None
            copied = module_from_spec(spec)
            setattr(copied, STEP, stepper())
            copies[_short(original)] = copied
            _install(copied)
            loader.exec_module(copied)
    finally:
        for original in SHIPPED:
            _install(original)
    return _subject(copies)


def _install(module: ModuleType) -> None:
    """Have imports find this module."""
    sys.modules[module.__name__] = module
    setattr(package, _short(module), module)


@cache
def _compiled(module: ModuleType) -> CodeType:
    return compile(source_of(module), module.__name__, "exec")


def _short(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]
