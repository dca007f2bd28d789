"""A task that fails ends nothing, is said once, counted, and shown until it works again."""

import logging

import pytest

from kvpool.clock import ManualClock
from kvpool.metrics import Metrics
from kvpool.server.http import Health
from kvpool.server.upkeep import FAILURES_MAX, Upkeep


class Scene:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.metrics, self.health = Metrics(), Health(self.clock)
        self.upkeep = Upkeep(self.metrics, self.health, self.clock)
        self.error: Exception | None = None
        self.ended = True
        self.turns = {"leases": 0, "gauges": 0}

    def run(self, turns: int = 1) -> None:
        for _ in range(turns):
            self.upkeep.run({"leases": self.leases, "gauges": self.gauges})

    def leases(self) -> bool:
        self.turns["leases"] += 1
        if self.error is not None:
            raise self.error
        return self.ended

    def gauges(self) -> None:
        self.turns["gauges"] += 1

    def failed(self) -> str:
        lines = self.metrics.expose().decode().splitlines()
        [line] = [one for one in lines if 'failed_upkeep_passes_total{task="leases"}' in one]
        return line.split()[1]


def test_a_task_that_fails_is_tried_again_and_keeps_no_other_from_its_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene()
    scene.error = ZeroDivisionError("of leases")
    scene.run(100)
    assert scene.turns == {"leases": 100, "gauges": 100}
    assert scene.failed() == "100.0"
    [said] = caplog.records  # not a hundred times
    assert said.levelno == logging.ERROR and said.exc_info
    assert "leases failed (ZeroDivisionError: of leases)" in said.getMessage()
    assert scene.health.troubles() == "leases fails: ZeroDivisionError: of leases"
    scene.clock.advance(3600)
    scene.run()
    assert len(caplog.records) == 2
    scene.error = None
    scene.run()
    assert scene.health.troubles() == ""
    assert caplog.records[-1].getMessage() == "leases works again"


def test_one_failure_is_counted_and_takes_nobody_away() -> None:
    scene = Scene()
    scene.error = ValueError("once")
    scene.run(FAILURES_MAX - 1)
    assert scene.health.troubles() == ""
    scene.error = None
    scene.run()
    scene.error = ValueError("again")
    scene.run(FAILURES_MAX - 1)
    assert scene.health.troubles() == "", "they were not in a row"
    assert scene.failed() == f"{2 * (FAILURES_MAX - 1)}.0"


def test_what_is_under_way_is_no_success() -> None:
    """A scan that takes longer than a turn fails as well as a short one, and nobody is told it works."""
    scene = Scene()
    for _ in range(FAILURES_MAX):
        scene.error, scene.ended = ValueError("of the scan before"), False
        scene.run()
        scene.error = None
        scene.run(2)
    assert scene.health.troubles() == "leases fails: ValueError: of the scan before"
    scene.ended = True
    scene.run()
    assert scene.health.troubles() == ""
