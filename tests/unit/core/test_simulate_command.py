"""`kvpool simulate` end to end on tiny traces: files, equal tables, what it refuses."""

import csv
import io
import json
import random
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvpool.cli.main import main
from kvpool.integration.conductor.papers import papers_profile
from kvpool.integration.conductor.profile import write_profile

FIGURES = ("fig5", "fig8", "table3", "fig9", "fig10", "fig15", "fig6", "own")


def write_trace(path: Path, requests: int) -> Path:
    """Write a trace of conversations that go on: each has its own blocks after a shared first."""
    rng = random.Random(7)
    sessions: list[list[int]] = []
    rows, fresh = [], 1
    for number in range(requests):
        if sessions and rng.random() < 0.5:
            blocks = sessions[rng.randrange(len(sessions))]
        else:
            blocks = [0]
            sessions.append(blocks)
        added = rng.randint(1, 12)
        blocks.extend(range(fresh, fresh + added))
        fresh += added
        rows.append(
            {
                "timestamp": 3000 * (number // 4),
                "input_length": 512 * len(blocks),
                "output_length": rng.randint(1, 60),
                "hash_ids": list(blocks),
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("traces")
    return [
        write_trace(folder / "conversation_trace.jsonl", 50),
        write_trace(folder / "synthetic_trace.jsonl", 40),
    ]


def simulate(traces: list[Path], out: Path, *more: str) -> int:
    named = [argument for path in traces for argument in ("--trace", str(path))]
    return main(["simulate", *named, "--out", str(out), *more])


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as opened:
        return list(csv.DictReader(opened))


@pytest.fixture(scope="module")
def whole(traces: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "report"
    assert simulate(traces, out, "--suite", "mooncake", "--seed", "3") == 0
    return out


def test_the_suite_writes_every_figure_and_one_page(whole: Path) -> None:
    wanted = {f"{name}.{kind}" for name in FIGURES for kind in ("csv", "png")} | {"report.html"}
    assert {path.name for path in whole.iterdir()} == wanted
    for name in FIGURES:
        assert table(whole / f"{name}.csv")
        assert (whole / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_is_whole_and_loads_nothing(whole: Path) -> None:
    text = (whole / "report.html").read_text()
    sources = re.findall(r"(?:src|href)='([^']+)'", text)
    assert len(sources) == 2 * len(FIGURES)
    assert all(source.startswith(("data:image/png;base64,", "#")) for source in sources)
    assert "http" not in text
    body = text.split("<body>")[1].split("</body>")[0]
    ElementTree.fromstring(f"<body>{body.replace('&#x27;', '')}</body>")  # every tag is closed


def test_figure_5_has_the_columns_that_are_asked_for(whole: Path) -> None:
    rows = table(whole / "fig5.csv")
    assert [row["policy"] for row in rows] == [
        "kvcache-centric",
        "cache-aware",
        "load-balancing",
        "random",
    ]
    assert all(float(row["mean_ttft_s"]) > 0 for row in rows)


def test_equal_seeds_write_equal_files(traces: list[Path], whole: Path, tmp_path: Path) -> None:
    for figure in ("fig5", "table3", "own"):
        assert simulate(traces, tmp_path, "--figure", figure, "--seed", "3") == 0
        for kind in ("csv", "png"):
            name = f"{figure}.{kind}"
            assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()
    assert simulate(traces, tmp_path, "--figure", "fig5", "--seed", "4") == 0
    assert (tmp_path / "fig5.csv").read_bytes() != (whole / "fig5.csv").read_bytes()


def test_a_run_of_a_generated_load(tmp_path: Path) -> None:
    run = ["--figure", "run", "--poisson", "2", "--requests", "60"]
    nodes = ["--prefill", "2", "--decode", "3", "--policy", "cache-aware", "--admission", "early"]
    assert simulate([], tmp_path, *run, *nodes) == 0
    (row,) = table(tmp_path / "run.csv")
    assert (row["requests"], row["prefill"], row["decode"]) == ("60", "2", "3")
    assert (tmp_path / "report.html").exists()


def test_ours_is_shown_for_five_seeds_with_what_each_part_does(whole: Path) -> None:
    rows = table(whole / "own.csv")
    for trace in ("conversation", "synthetic"):
        mine = [row for row in rows if row["trace"] == trace]
        assert len({row["speed"] for row in mine}) == 1
        settings = {row["setting"] for row in mine}
        assert {"papers, early", "ours", "ours, no patience"} <= settings
        assert [row["seed"] for row in mine if row["setting"] == "ours"] == [*"34567", "mean"]
        shares = [float(row["effective_share"]) for row in mine if row["setting"] == "ours"]
        assert shares[-1] == pytest.approx(sum(shares[:-1]) / 5, rel=1e-5)


def test_a_run_on_a_measured_machine(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    write_profile(papers_profile(), profile)
    run = ["--figure", "run", "--poisson", "2", "--requests", "40", "--tbt-s", "0.2"]
    assert simulate([], tmp_path / "measured", *run, "--profile", str(profile)) == 0
    assert simulate([], tmp_path / "slower", *run, "--tbt-s", "1", "--speed", "1") == 0
    measured, papers = (table(tmp_path / name / "run.csv") for name in ("measured", "slower"))
    assert measured[0]["requests"] == papers[0]["requests"] == "40"
    assert measured[0]["mean_tbt_s"] != papers[0]["mean_tbt_s"]  # its decode step is another
    page = (tmp_path / "measured" / "report.html").read_text()
    assert "profile profile.json" in page
    assert "TBT 0.2 s" in page


def test_progress_and_verdicts_are_told(
    traces: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(traces, tmp_path, "--figure", "fig10") == 0
    told = capsys.readouterr()
    assert "fig10: A store a node against one pool" in told.out
    assert "holds" in told.out.lower()
    assert "report.html" in told.out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--figure", "fig99"], "no figure is named 'fig99'"),
        (["--figure", "run"], "needs one load"),
        (["--figure", "run", "--poisson", "0"], "rate_per_s is 0"),
        (["--figure", "run", "--poisson", "1", "--prefill", "0"], "prefill_count is 0"),
        (["--figure", "run", "--poisson", "1", "--policy", "wisest"], "policy is 'wisest'"),
        (["--figure", "run", "--poisson", "1", "--ttft-s", "0.001"], "ttft_s is 0.001"),
        (["--figure", "run", "--poisson", "1", "--tbt-s", "0"], "tbt_s is 0"),
        (["--figure", "run", "--poisson", "1", "--profile", "absent"], "cannot read absent"),
        (["--suite", "mooncake"], "give --trace"),
        (["--figure", "fig5", "--policy", "random"], "--policy would change nothing"),
        (["--tbt-s", "0.2"], "--tbt-s would change nothing"),
        (["--figure", "run", "--poisson", "1", "--speed", "2"], "--speed would change nothing"),
        (["--figure", "run", "--requests", "5", "--trace", "x"], "--requests would change nothing"),
        (["--trace", "absent.jsonl"], "absent.jsonl cannot be read"),
    ],
)
def test_what_cannot_be_simulated_is_said(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--out", str(tmp_path), *arguments]) == 2
    assert told in capsys.readouterr().err


def test_a_bad_trace_names_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "t.jsonl", 3)
    path.write_text(path.read_text() + '{"timestamp": 0, "colour": 1}\n')
    assert simulate([path], tmp_path) == 2
    assert "t.jsonl, line 4" in capsys.readouterr().err


@pytest.mark.parametrize("figure", ["run", "fig5", "table3"])  # with samples of the load, without
def test_an_answer_that_fits_nowhere_is_refused(
    figure: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    row = {"timestamp": 0, "input_length": 9, "output_length": 9, "hash_ids": [0]}
    long = row | {"output_length": 2_000_000}
    path.write_text(json.dumps(row) + "\n" + json.dumps(long) + "\n")
    assert simulate([path], tmp_path, "--figure", figure) == 2
    assert "request 2 of the load has" in capsys.readouterr().err


class Impatient(io.StringIO):
    """A terminal whose user presses Ctrl-C when progress is shown."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if "%" in text:
            raise KeyboardInterrupt
        return super().write(text)


@pytest.mark.parametrize("what", [["--figure", "run", "--poisson", "9"], ["--figure", "fig5"]])
def test_ctrl_c_ends_it_and_writes_no_report(
    what: list[str], traces: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Impatient()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert simulate([] if "run" in what else traces, tmp_path, *what) == 130
    assert "stopped" in terminal.getvalue()
    assert list(tmp_path.iterdir()) == []


def test_two_traces_of_one_name_are_refused(
    traces: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate([traces[0], traces[0]], tmp_path) == 2
    assert "two traces are named conversation" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_said(
    traces: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert simulate(traces, tmp_path / "file", "--figure", "fig10") == 2
    told = capsys.readouterr()
    assert "cannot be written" in told.err
    assert "fig10" not in told.out  # it is said before anything is simulated
