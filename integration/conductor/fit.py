"""Fits a sum of non-negative terms to measured times, and says how wrong it is.

Owns the least squares and the errors; what the terms mean is the caller's. Pure. Who calls it:
`profile.py`.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from kvpool.errors import UsageError
from kvpool.integration.conductor.snapshot import Floats


class FitError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far a fit is from what was measured, as shares of what was measured.

    Attributes:
        mean, worst: Over the measurements that were fitted.
        held_out: Mean over the measurements, each predicted by a fit to all others; None where
            there are too few to leave one out.
    """

    mean: float
    worst: float
    held_out: float | None


def fit(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], FitError]:
    """Find weights ``>= 0``, one a term, with the least squares of relative errors.

    Relative, because a short prefill must be predicted as well as a long one. A weight that would
    be negative is 0: more work never takes less time.

    Args:
        terms: One row a measurement, one column a term.
        seconds: What was measured, above 0.

    Raises:
        UsageError: Fewer measurements than terms, or one that is not above 0.
    """
    if not terms or len(terms) < len(terms[0]):
        raise UsageError(
            f"{len(terms)} measurements cannot fit {len(terms[0]) if terms else 'any'} terms: "
            "measure more"
        )
    if min(seconds) <= 0:
        raise UsageError("a measured time is not above 0: measure again")
    measured = np.asarray(seconds, dtype=np.float64)
    rows = np.asarray(terms, dtype=np.float64) / measured[:, None]
    weights = _non_negative(rows)
    errors = np.abs(rows @ weights - 1)
    held_out = None
    if len(rows) > len(weights):
        left_out = [
            abs(float(rows[at] @ _non_negative(np.delete(rows, at, axis=0))) - 1)
            for at in range(len(rows))
        ]
        held_out = float(np.mean(left_out))
    return weights.tolist(), FitError(
        mean=float(errors.mean()), worst=float(errors.max()), held_out=held_out
    )


def _non_negative(rows: Floats) -> Floats:
    """Solve ``rows @ weights = 1`` with ``weights >= 0``: drop the most negative until none is."""
    used = list(range(rows.shape[1]))
    while used:
        scale = np.linalg.norm(rows[:, used], axis=0)
        scale[scale == 0] = 1
        found = np.linalg.lstsq(rows[:, used] / scale, np.ones(len(rows)), rcond=None)[0]
        if found.min() >= 0:
            weights = np.zeros(rows.shape[1])
            weights[used] = found / scale
            return weights
        del used[int(found.argmin())]
    return np.zeros(rows.shape[1])
