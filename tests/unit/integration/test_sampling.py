"""Greedy and drawn tokens, and that a draw depends on (seed, draw) alone."""

import math
from collections import Counter

import pytest
import torch

from kvpool.errors import UsageError
from kvpool.integration.runtime.handoff import Sampling
from kvpool.integration.runtime.sampling import sample, uniform

GREEDY = Sampling()


def logits(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def draws(sampling: Sampling, row: torch.Tensor, count: int = 400) -> Counter[int]:
    rows = row.expand(count, -1)
    return Counter(token for token, _ in sample(rows, [sampling] * count, range(count)))


def test_greedy_takes_the_largest_and_its_logprob() -> None:
    [(token, logprob)] = sample(logits(0.2, 0.5, 0.3), [GREEDY], [7])
    assert token == 1
    assert logprob == pytest.approx(math.log(0.5), abs=1e-6)


def test_a_drawn_token_has_the_logprob_of_the_unmodified_distribution() -> None:
    hot = Sampling(temperature=5.0, top_k=2, seed=1)
    row = torch.tensor([[0.1, 0.6, 0.3]]).log() + 2.0  # a shift changes nothing
    for draw in range(20):
        [(token, logprob)] = sample(row, [hot], [draw])
        assert logprob == pytest.approx(math.log([0.1, 0.6, 0.3][token]), abs=1e-6)


def test_a_draw_depends_on_seed_and_number_alone() -> None:
    sampling = Sampling(temperature=1.0, seed=42)
    torch.manual_seed(9)
    row = torch.randn(1, 50)
    alone = [sample(row, [sampling], [draw])[0] for draw in range(16)]
    crowd = torch.cat([torch.randn(1, 50), row, torch.randn(1, 50)])
    others = Sampling(temperature=0.7, seed=3)
    for draw in reversed(range(16)):
        assert sample(crowd, [others, sampling, GREEDY], [1, draw, 0])[1] == alone[draw]
    assert len({token for token, _ in alone}) > 4
    reseeded = Sampling(temperature=1.0, seed=43)
    assert [sample(row, [reseeded], [draw])[0] for draw in range(16)] != alone


def test_uniform_numbers_are_pinned() -> None:
    # Another value here breaks requests that are in flight between workers of two versions.
    assert uniform(0, 0) == uniform(2**64, 0)
    assert uniform(42, 0) == pytest.approx(0.4527557625958699, abs=1e-15)
    numbers = [uniform(1, draw) for draw in range(2000)]
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert sum(numbers) / 2000 == pytest.approx(0.5, abs=0.03)


def test_frequencies_follow_the_probabilities() -> None:
    counts = draws(Sampling(temperature=1.0, seed=5), logits(0.5, 0.3, 0.2), 2000)
    assert [counts[token] / 2000 for token in range(3)] == pytest.approx([0.5, 0.3, 0.2], abs=0.05)


def test_temperature_flattens() -> None:
    counts = draws(Sampling(temperature=2.0, seed=5), logits(0.8, 0.2), 2000)
    assert counts[1] / 2000 == pytest.approx(1 / 3, abs=0.05)  # sqrt(.2) / (sqrt(.8) + sqrt(.2))


def test_top_k_keeps_the_k_largest() -> None:
    row = logits(0.1, 0.4, 0.2, 0.3)
    assert set(draws(Sampling(temperature=1.0, top_k=2, seed=1), row)) == {1, 3}
    assert set(draws(Sampling(temperature=1.0, top_k=99, seed=1), row)) == {0, 1, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    row = logits(0.1, 0.5, 0.15, 0.25)
    assert set(draws(Sampling(temperature=1.0, top_p=0.6, seed=1), row)) == {1, 3}
    assert set(draws(Sampling(temperature=1.0, top_p=0.01, seed=1), row)) == {1}
    both = Sampling(temperature=1.0, top_p=0.9, top_k=3, seed=1)
    assert set(draws(both, row)) == {1, 2, 3}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=-1.0),
        Sampling(temperature=math.nan),
        Sampling(temperature=math.inf),
        Sampling(top_p=0.0),
        Sampling(top_p=1.5),
        Sampling(top_k=-1),
    ],
)
def test_what_cannot_be_sampled_is_refused(sampling: Sampling) -> None:
    with pytest.raises(UsageError):
        sample(logits(0.5, 0.5), [sampling], [0])


def test_counts_must_agree() -> None:
    with pytest.raises(UsageError):
        sample(logits(0.5, 0.5), [GREEDY, GREEDY], [0, 0])
