"""What a simulation gives: a number for each request, samples of the load, and their sums.

Owns the columns and what is computed from them. Who calls it: the figures and their report.
"""

import math
from array import array
from dataclasses import dataclass, field

import numpy as np

from kvpool.integration.conductor.plan import Reason
from kvpool.integration.conductor.snapshot import Bools, Floats, Objectives
from kvpool.integration.simulator.job import End, Job


def _floats() -> "array[float]":
    return array("d")


@dataclass(slots=True)
class Pressure:
    """How busy the cluster was, sampled at even moments; loads are shares of an objective.

    Attributes:
        at_s: The moments.
        prefill: Mean over prefill workers of predicted wait / TTFT objective.
        decode: Mean over decode workers of the time of a step / TBT objective.
        running: Requests in decode batches.
    """

    at_s: "array[float]" = field(default_factory=_floats)
    prefill: "array[float]" = field(default_factory=_floats)
    decode: "array[float]" = field(default_factory=_floats)
    running: "array[float]" = field(default_factory=_floats)


class Outcome:
    """Columns over requests in order of their ends, and samples of the load."""

    def __init__(self) -> None:
        self.pressure = Pressure()
        self.reasons: dict[Reason, int] = dict.fromkeys(Reason, 0)
        self.sent_bytes = 0.0
        self._columns = {
            name: array("d")
            for name in (
                *("number", "arrival_s", "input_tokens", "output_tokens", "end", "ttft_s"),
                *("tbt_s", "prefill_s", "cached_tokens", "moved_tokens", "ended_s"),
            )
        }

    def __len__(self) -> int:
        return len(self._columns["number"])

    def note(self, job: Job) -> None:
        """Take down a request that has ended."""
        columns, request = self._columns, job.request
        columns["number"].append(request.number)
        columns["arrival_s"].append(request.arrival_s)
        columns["input_tokens"].append(request.input_tokens)
        columns["output_tokens"].append(request.output_tokens)
        columns["end"].append(float("nan") if job.end is None else job.end)
        columns["ttft_s"].append(job.ttft_s)
        columns["tbt_s"].append(job.tbt_s)
        columns["prefill_s"].append(job.prefill_s)
        columns["cached_tokens"].append(job.cached_tokens)
        columns["moved_tokens"].append(job.moved_tokens)
        columns["ended_s"].append(job.ended_s)

    def column(self, name: str) -> Floats:
        """Return one number for each request."""
        return np.frombuffer(self._columns[name], dtype=np.float64)

    def ended(self, end: End) -> Bools:
        """Say of each request whether it ended so."""
        return np.equal(self.column("end"), end)

    def count(self, end: End) -> int:
        """Return how many requests ended so."""
        return int(self.ended(end).sum())

    def mean_ttft_s(self) -> float:
        """Return the mean time to first token of what was served."""
        return self._mean("ttft_s")

    def mean_tbt_s(self) -> float:
        """Return the mean time between tokens of what was served and had more than one token."""
        chosen = self.ended(End.DONE) & (self.column("output_tokens") > 1)
        return float(self.column("tbt_s")[chosen].mean()) if chosen.any() else math.nan

    def mean_prefill_s(self) -> float:
        """Return the mean time that a prefill worker was busy with a request that was served."""
        return self._mean("prefill_s")

    def hit_rate(self) -> float:
        """Return the share of prompt tokens, of all that was served, that were not computed."""
        served = self.ended(End.DONE)
        tokens = self.column("input_tokens")[served].sum()
        return float(self.column("cached_tokens")[served].sum() / tokens) if tokens else 0.0

    def effective(self, objectives: Objectives) -> Bools:
        """Say of each request whether it was served within both objectives."""
        in_time = self.column("ttft_s") <= objectives.ttft_s
        return self.ended(End.DONE) & in_time & (self.column("tbt_s") <= objectives.tbt_s)

    def effective_share(self, objectives: Objectives) -> float:
        """Return the share of all requests that were served within both objectives."""
        return float(self.effective(objectives).mean()) if len(self) else 0.0

    def _mean(self, name: str) -> float:
        served = self.ended(End.DONE)
        return float(self.column(name)[served].mean()) if served.any() else math.nan
