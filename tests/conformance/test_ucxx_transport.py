"""The ucxx transport passes the suite and its fault tests, in the environment that ``make env`` makes.

ucxx holds UCX to versions below the one kvpool is developed with, so it is not in this process. The
run there is part of this one: if that environment is missing, this fails.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Counted in the files: a run that collects fewer would be green and say nothing.
CHECKS_MIN = 40


@pytest.mark.ucx
@pytest.mark.timeout(280)
def test_ucxx_passes_in_its_own_environment() -> None:
    python = Path(sys.prefix) / "ucxx" / "bin" / "python"
    assert python.exists(), "there is no environment with ucxx: make env"
    run = subprocess.run(
        [
            str(python),
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/conformance/ucxx_suite.py",
            "tests/faults/ucxx_faults.py",
            "tests/conformance/nixl_beside.py",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=270,
        check=False,
    )
    said = run.stdout + run.stderr
    assert run.returncode == 0, said[-8000:]
    passed = re.search(r"(\d+) passed", said)
    assert passed, said[-8000:]
    assert int(passed[1]) >= CHECKS_MIN, said[-8000:]
    assert "skipped" not in said, said[-8000:]
