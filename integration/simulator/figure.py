"""What a figure is: a table, charts of it, and whether it comes out as the papers have it.

Owns these types and how a table is written. Who calls it: each figure makes one, the report shows
it.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Cell = str | int | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line, or one group of bars, of a chart.

    Attributes:
        name: Of the legend.
        xs, ys: Points; ``xs`` are names where the chart has bars.
        printed: True if the papers print it, so that it is drawn apart.
    """

    name: str
    xs: Sequence[float | str]
    ys: Sequence[float | None]
    printed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One pair of axes."""

    title: str
    kind: Literal["bars", "lines"]
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """A statement about a figure, and whether it holds here."""

    text: str
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of the report.

    Attributes:
        name: Of its files, ``NAME.csv`` and ``NAME.png``.
        title, printed_in: What it shows; where the papers have it, "" if nowhere.
        columns, rows: Its table.
        charts: What is drawn of it.
        checks: What must hold for it to have come out.
        text: How it was made; why it does not come out, where it does not.
    """

    name: str
    title: str
    printed_in: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    charts: Sequence[Chart]
    checks: Sequence[Check] = field(default=())
    text: str = ""

    @property
    def comes_out(self) -> bool:
        """Whether all its checks hold."""
        return all(check.holds for check in self.checks)

    def table(self) -> str:
        """Return the table as CSV."""
        written = io.StringIO()
        writer = csv.writer(written, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([shown(cell) for cell in row] for row in self.rows)
        return written.getvalue()


def shown(cell: Cell) -> str:
    """Return a cell as text: floats to six digits, nothing for None."""
    if cell is None:
        return ""
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)
