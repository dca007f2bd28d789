"""A fit finds what times were made of, never a negative weight, and says how wrong it is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import UsageError
from kvpool.integration.conductor.fit import fit

WEIGHTS = st.tuples(
    st.floats(0.01, 1.0), st.floats(1e-5, 1e-2), st.one_of(st.just(0.0), st.floats(1e-9, 1e-6))
)
SIZES = (64, 128, 256, 512, 1024, 4096)


def terms() -> list[tuple[float, ...]]:
    return [(1.0, size, size * size) for size in SIZES]


@given(weights=WEIGHTS)
def test_exact_times_are_fitted_exactly(weights: tuple[float, ...]) -> None:
    seconds = [float(np.dot(row, weights)) for row in terms()]
    found, error = fit(terms(), seconds)
    assert found == pytest.approx(weights, rel=1e-6, abs=1e-12)
    assert error.worst < 1e-6
    assert error.held_out is not None
    assert error.held_out < 1e-6


@given(
    weights=WEIGHTS,
    off=st.lists(st.floats(0.8, 1.25), min_size=len(SIZES), max_size=len(SIZES)),
)
def test_noise_shows_in_the_error_and_no_weight_is_negative(
    weights: tuple[float, ...], off: list[float]
) -> None:
    seconds = [float(np.dot(row, weights)) * one for row, one in zip(terms(), off, strict=True)]
    found, error = fit(terms(), seconds)
    assert min(found) >= 0
    fitted = np.array([np.dot(row, found) for row in terms()])
    errors = np.abs(fitted / seconds - 1)
    assert error.mean == pytest.approx(errors.mean(), abs=1e-9)
    assert error.worst == pytest.approx(errors.max(), abs=1e-9)
    assert error.worst < 0.5


def test_what_would_be_negative_is_nothing() -> None:
    found, error = fit(terms(), [1.0, 0.9, 0.8, 0.7, 0.6, 0.5])
    assert found[1:] == [0, 0]
    assert found[0] > 0
    assert error.mean > 0.1


def test_one_left_out_is_predicted_worse_than_fitted() -> None:
    seconds = [1.0, 1.1, 0.9, 1.05, 0.95, 1.2]
    _, error = fit([(1.0, size) for size in SIZES], seconds)
    assert error.held_out is not None
    assert error.held_out > error.mean
    _, error = fit([(1.0, 2.0), (1.0, 3.0)], [1.0, 1.5])
    assert error.held_out is None


@pytest.mark.parametrize(
    ("rows", "seconds", "says"),
    [
        ([], [], "measure more"),
        ([(1.0, 2.0)], [1.0], "measure more"),
        ([(1.0,), (2.0,)], [1.0, 0.0], "above 0"),
    ],
)
def test_too_little_is_refused(
    rows: list[tuple[float, ...]], seconds: list[float], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        fit(rows, seconds)
