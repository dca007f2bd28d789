"""All figures, by name, in the order of the report.

Owns the list. Who calls it: ``kvpool simulate``.
"""

from collections.abc import Callable, Mapping
from typing import Final

from kvpool.integration.simulator.cache_figures import figure9, figure10
from kvpool.integration.simulator.figure import Figure
from kvpool.integration.simulator.objective_figures import figure6, figure15
from kvpool.integration.simulator.overload_figure import table3
from kvpool.integration.simulator.own_figure import own
from kvpool.integration.simulator.scheduling_figures import figure5, figure8
from kvpool.integration.simulator.suite import Suite

FIGURES: Final[Mapping[str, Callable[[Suite], Figure]]] = {
    "fig5": figure5,
    "fig8": figure8,
    "table3": table3,
    "fig9": figure9,
    "fig10": figure10,
    "fig15": figure15,
    "fig6": figure6,
    "own": own,
}
