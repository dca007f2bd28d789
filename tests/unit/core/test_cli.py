import json
from pathlib import Path

import pytest

from kvpool.cli import bench, bench_index, bench_tiers, bench_transfer
from kvpool.cli.bench import Row
from kvpool.cli.main import main
from kvpool.errors import UsageError


@pytest.mark.parametrize(("pairs", "index"), [(1, 0), (3, 0), (4, 0), (7, 1), (9, 2), (20, 6)])
def test_the_bound_of_the_median(pairs: int, index: int) -> None:
    ratios = [float(number) for number in range(pairs)]
    assert bench.unfavourable(ratios, lower_is_better=False) == index
    assert bench.unfavourable(ratios, lower_is_better=True) == pairs - 1 - index


def test_names_are_the_ones_of_the_design() -> None:
    found = {
        row.name
        for module in (bench_index, bench_tiers, bench_transfer)
        for row in module.cases(True)
    }
    assert found == {
        "index.match.131072",
        "tiers.dram.load.2MiB",
        "tiers.dram.load.256KiB",
        "tiers.dram.store.2MiB",
        "tiers.dram.store.256KiB",
        *(f"tiers.ssd.{what}.{size}" for what in ("read", "write") for size in ("2MiB", "256KiB")),
        *("tiers.ssd.open.1000000", "tiers.ssd.resident.1000000"),
        "tiers.stack.load_under_flush",
        *(
            f"transfer.tcp.{what}.{size}"
            for what in ("read", "write", "write_spans")
            for size in ("64KiB", "1MiB")
        ),
        *(f"transfer.tcp.batch.{count}" for count in (4, 16, 64, 256, 1024)),
        *("transfer.tcp.submit.256", "transfer.tcp.idle"),
        *(f"transfer.tcp.beside.{fate}" for fate in ("killed", "stopped", "cut", "slow")),
        "transfer.host.pull.64KiB",
        "transfer.host.pull.1MiB",
        "transfer.stream.overlap",
    }


def test_every_subject_is_there_or_says_so(tmp_path: Path) -> None:
    trace = tmp_path / "a_trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 1, "hash_ids": [0]}')
    for subject in bench.SUBJECTS:
        traces = [trace] if subject in bench.TRACED else []
        try:
            cases = bench.cases_of(subject, quick=True, traces=traces)
        except UsageError as error:
            assert "cannot be measured here" in str(error)
        else:
            assert cases
            assert all(found.name.startswith(f"{subject}.") for found in cases)
    with pytest.raises(UsageError, match="choose one of tiers"):
        bench.cases_of("nothing", quick=True)
    with pytest.raises(UsageError, match="leave it out"):
        bench.cases_of("index", quick=True, traces=[trace])


def test_the_json_has_the_fields_of_the_design(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "index", "--quick", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    fields = ["name", "value", "unit", "reference", "reference_value", "ratio", "low"]
    assert list(row) == [*fields, "pairs", "spread", "valid"]
    assert list(row) == list(Row.__slots__)
    assert (row["name"], row["pairs"], row["valid"]) == ("index.match.131072", 3, False)


def test_the_table_says_when_a_row_is_not_valid(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "index", "--quick"]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.startswith("row")
    assert line.startswith("index.match.131072")
    assert line.endswith("not valid: --quick")


def test_version_and_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out[0].isdigit()
    assert main(["stat", "--run-dir", str(tmp_path)]) == 2
    assert "kvpool-server --run-dir" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "nothing"])
