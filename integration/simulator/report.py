"""The report: figures as PNG, tables as CSV, and one HTML page that needs nothing beside it.

Owns how a figure looks. Who calls it: ``kvpool simulate``.
"""

import base64
import html
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

from kvpool.errors import UsageError
from kvpool.integration.simulator.figure import Chart, Figure, shown

REPORT: Final = "report.html"
_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em;
       color: #222; background: #fff }
img { max-width: 100% } h2 { margin-top: 2.5em } .scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px } td, th { padding: .15em .7em; text-align: right;
       border-bottom: 1px solid #ddd } td:first-child, th:first-child { text-align: left }
.yes { color: #176b2c } .no { color: #a11 }
"""
_PRINTED: Final = "#999999"
_ABREAST: Final = 2  # charts in a line: more could not be read on the page
_COLOURS: Final = ("#1b6ca8", "#d1495b", "#2e933c", "#edae49", "#66418f", "#00798c", "#8c510a")


def prepare(folder: Path) -> None:
    """Make the folder of a report, and try whether it can be written, before hours of simulation.

    Raises UsageError if it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}", path=folder) from error


def write_figure(figure: Figure, folder: Path) -> bytes:
    """Write ``NAME.csv`` and ``NAME.png``; return the picture.

    Raises UsageError if the folder is not there or cannot be written: `prepare` it first.
    """
    picture = drawn(figure)
    try:
        (folder / f"{figure.name}.csv").write_text(figure.table(), encoding="utf-8")
        (folder / f"{figure.name}.png").write_bytes(picture)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}", path=folder) from error
    return picture


def write_report(
    figures: Sequence[Figure], pictures: Sequence[bytes], facts: Sequence[str], folder: Path
) -> Path:
    """Write the page of all figures; return its path. Raises UsageError as ``write_figure``."""
    path = folder / REPORT
    try:
        path.write_text(rendered(figures, pictures, facts), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", path=path) from error
    return path


def rendered(figures: Sequence[Figure], pictures: Sequence[bytes], facts: Sequence[str]) -> str:
    """Return the page. It loads nothing: the pictures, one a figure, are inside."""
    parts = [
        "<!doctype html>\n<html lang='en'>\n<head><meta charset='utf-8' /><title>kvpool simulate</title>",
        "<meta name='viewport' content='width=device-width' />",
        f"<style>{_STYLE}</style></head>\n<body>\n<h1>kvpool simulate</h1>",
        "<p>What is simulated and what is not: docs/simulator.md. Grey is what the papers print.</p>",
        "<ul>" + "".join(f"<li>{html.escape(fact)}</li>" for fact in facts) + "</ul>",
        "<h2>Summary</h2>\n<table><tr><th>figure</th><th>checks that hold</th></tr>",
    ]
    for figure in figures:
        held = sum(check.holds for check in figure.checks)
        kind = "yes" if figure.comes_out else "no"
        parts.append(
            f"<tr><td><a href='#{figure.name}'>{html.escape(figure.title)}</a></td>"
            f"<td class='{kind}'>{held} of {len(figure.checks)}</td></tr>"
        )
    parts.append("</table>")
    parts.extend(map(_section, figures, pictures))
    return "\n".join([*parts, "</body>\n</html>\n"])


def _section(figure: Figure, png: bytes) -> str:
    picture = base64.b64encode(png).decode()
    checks = "".join(
        f"<li class='{'yes' if check.holds else 'no'}'>{'holds' if check.holds else 'does not hold'}: "
        f"{html.escape(check.text)}</li>"
        for check in figure.checks
    )
    head = "".join(f"<th>{html.escape(name)}</th>" for name in figure.columns)
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(shown(cell))}</td>" for cell in row) + "</tr>"
        for row in figure.rows
    )
    source = f" <small>({html.escape(figure.printed_in)})</small>" if figure.printed_in else ""
    return (
        f"<h2 id='{figure.name}'>{html.escape(figure.title)}{source}</h2>\n"
        f"<p>{html.escape(figure.text)}</p>\n"
        f"<img alt='{html.escape(figure.title)}' src='data:image/png;base64,{picture}' />\n"
        f"<ul>{checks}</ul>\n<div class='scroll'><table><tr>{head}</tr>\n{rows}</table></div>"
    )


def drawn(figure: Figure) -> bytes:
    """Return the figure as a PNG. Equal figures give equal bytes."""
    count = len(figure.charts)
    columns = min(count, _ABREAST)
    lines = -(-count // columns)
    width, height = 6.4 * columns, 4.2 * lines
    canvas = Canvas(figsize=(width, height), dpi=90)
    FigureCanvasAgg(canvas)
    # As a constrained layout would, for labels of one line, at a tenth of its time.
    canvas.subplots_adjust(
        left=0.8 / width,
        right=1 - 0.2 / width,
        bottom=0.84 / height,
        top=1 - 0.34 / height,
        wspace=0.2,
        hspace=0.4,
    )
    for index, chart in enumerate(figure.charts):
        _draw(canvas.add_subplot(lines, columns, index + 1), chart)
    written = io.BytesIO()
    canvas.savefig(written, format="png", metadata={"Software": "kvpool"})
    return written.getvalue()


def _draw(axes: Axes, chart: Chart) -> None:
    axes.set_title(chart.title, fontsize=11)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if chart.kind == "bars":
        _draw_bars(axes, chart)
    else:
        _draw_lines(axes, chart)
    if chart.log_x:
        axes.set_xscale("log")
    if chart.log_y:
        axes.set_yscale("log")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)


def _draw_bars(axes: Axes, chart: Chart) -> None:
    names = list(dict.fromkeys(str(x) for series in chart.series for x in series.xs))
    width = 0.8 / len(chart.series)
    for index, series in enumerate(chart.series):
        known = [
            (names.index(str(x)), y)
            for x, y in zip(series.xs, series.ys, strict=True)
            if y is not None
        ]
        places = [place + (index - (len(chart.series) - 1) / 2) * width for place, _ in known]
        heights = [y for _, y in known]
        colour = _PRINTED if series.printed else _COLOURS[index % len(_COLOURS)]
        bars = axes.bar(places, heights, width, label=series.name, color=colour)
        axes.bar_label(bars, fmt="%.3g", fontsize=7)
    if sum(map(len, names)) > 60:  # too long to stand side by side
        axes.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize=8)
    else:
        axes.set_xticks(range(len(names)), names)


def _draw_lines(axes: Axes, chart: Chart) -> None:
    for index, series in enumerate(chart.series):
        known = [(x, y) for x, y in zip(series.xs, series.ys, strict=True) if y is not None]
        colour = _PRINTED if series.printed else _COLOURS[index % len(_COLOURS)]
        axes.plot(
            [x for x, _ in known],
            [y for _, y in known],
            "--" if series.printed else "-",
            marker="." if len(known) < 50 else "",
            linewidth=1.2,
            label=series.name,
            color=colour,
        )
