"""Greedy and drawn tokens, and that a draw depends on (seed, draw) alone."""

import math
from collections import Counter

import msgspec
import pytest
import torch

from kvpool.errors import UsageError
from kvpool.integration.runtime.handoff import Sampling
from kvpool.integration.runtime.sampling import gumbel, sample

GREEDY = Sampling()
NONE: list[tuple[int, ...]] = [()]


def logits(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def draws(sampling: Sampling, row: torch.Tensor, count: int = 400) -> Counter[int]:
    rows = row.expand(count, -1)
    return Counter(
        pick.token for pick in sample(rows, [sampling] * count, range(count), NONE * count)
    )


def test_greedy_takes_the_largest_and_its_logprob() -> None:
    [(token, logprob, top)] = sample(logits(0.2, 0.5, 0.3), [GREEDY], [7], NONE)
    assert (token, top) == (1, ())
    assert logprob == pytest.approx(math.log(0.5), abs=1e-6)


def test_a_drawn_token_has_the_logprob_of_the_unmodified_distribution() -> None:
    hot = Sampling(temperature=5.0, top_k=2, seed=1)
    row = torch.tensor([[0.1, 0.6, 0.3]]).log() + 2.0  # a shift changes nothing
    for draw in range(20):
        [(token, logprob, _)] = sample(row, [hot], [draw], NONE)
        assert logprob == pytest.approx(math.log([0.1, 0.6, 0.3][token]), abs=1e-6)


def test_a_draw_depends_on_seed_and_number_alone() -> None:
    sampling = Sampling(temperature=1.0, seed=42)
    torch.manual_seed(9)
    row = torch.randn(1, 50)
    alone = [sample(row, [sampling], [draw], NONE)[0] for draw in range(16)]
    crowd = torch.cat([torch.randn(1, 50), row, torch.randn(1, 50)])
    others = Sampling(temperature=0.7, seed=3)
    for draw in reversed(range(16)):
        assert sample(crowd, [others, sampling, GREEDY], [1, draw, 0], NONE * 3)[1] == alone[draw]
    assert len({pick.token for pick in alone}) > 4
    reseeded = Sampling(temperature=1.0, seed=43)
    assert [sample(row, [reseeded], [draw], NONE)[0] for draw in range(16)] != alone


def test_the_noise_is_pinned() -> None:
    # Another value here breaks requests that are in flight between workers of two versions.
    assert gumbel(0, 0, 9).equal(gumbel(2**64, 0, 9))
    assert gumbel(42, 0, 2).tolist() == pytest.approx(
        [0.49311920283728566, 0.6183886341932557], abs=1e-12
    )
    assert gumbel(42, 0, 9)[:2].equal(gumbel(42, 0, 2))
    noise = gumbel(1, 0, 20_000)
    assert noise.isfinite().all()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.03)  # Euler's constant
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.1)


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.95}, {"top_k": 5000}])
def test_rounding_of_another_batch_draws_the_same_tokens(cut: dict[str, float]) -> None:
    hot = msgspec.structs.replace(Sampling(temperature=1.5, seed=3), **cut)
    row = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(1))
    other = row + 1e-5 * torch.randn(1, 50_000, generator=torch.Generator().manual_seed(2))
    one, two = (
        [pick.token for pick in sample(rows.expand(40, -1), [hot] * 40, range(40), NONE * 40)]
        for rows in (row, other)
    )
    assert one == two
    assert len(set(one)) > 30


def test_frequencies_follow_the_probabilities() -> None:
    counts = draws(Sampling(temperature=1.0, seed=5), logits(0.5, 0.3, 0.2), 2000)
    assert [counts[token] / 2000 for token in range(3)] == pytest.approx([0.5, 0.3, 0.2], abs=0.05)


def test_temperature_flattens() -> None:
    counts = draws(Sampling(temperature=2.0, seed=5), logits(0.8, 0.2), 2000)
    assert counts[1] / 2000 == pytest.approx(1 / 3, abs=0.05)  # sqrt(.2) / (sqrt(.8) + sqrt(.2))


@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_the_lowest_temperature_is_greedy(cut: dict[str, float]) -> None:
    row = torch.tensor([[30.0, 80.0, -50.0, 79.0]])
    for temperature in (5e-324, 1e-308, 1e-30, 1e-6):
        cold = msgspec.structs.replace(Sampling(temperature=temperature), **cut)
        assert set(draws(cold, row)) == {1}


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


def test_the_likeliest_tokens_come_in_order_with_their_logprobs() -> None:
    hot = Sampling(temperature=1.0, top_k=1, top_logprobs=2, logit_bias=((0, 50.0),))
    plain = Sampling(top_logprobs=9)
    first, second = sample(logits(0.2, 0.5, 0.3).expand(2, -1), [hot, plain], [0, 0], NONE * 2)
    assert first.token == 0, "the bias decides what is drawn"
    assert [token for token, _ in first.top] == [1, 2], "and nothing of what is reported"
    assert first.logprob == pytest.approx(math.log(0.2), abs=1e-6)
    assert [token for token, _ in second.top] == [1, 2, 0]
    assert [math.exp(logprob) for _, logprob in second.top] == pytest.approx([0.5, 0.3, 0.2])


def test_penalties_count_what_the_output_holds() -> None:
    row = torch.tensor([[3.0, 2.9, 1.9, 0.0]])

    def choose(output: list[int], presence: float = 0.0, frequency: float = 0.0) -> int:
        sampling = Sampling(presence_penalty=presence, frequency_penalty=frequency)
        return sample(row, [sampling], [len(output)], [output])[0].token

    assert choose([], presence=2.0) == 0
    assert choose([0], presence=0.2) == 1
    assert choose([0] * 9, presence=0.05) == 0, "once, however often"
    assert choose([0] * 9 + [1] * 9, frequency=0.2) == 2, "each time"
    assert choose([3] * 40, frequency=-0.1) == 3, "a negative one invites"
    assert choose([0, 1], presence=1.5) == 2
    drawn = draws_after([0, 0], Sampling(temperature=1.0, presence_penalty=100.0), row)
    assert 0 not in drawn
    assert len(drawn) > 1


def draws_after(output: list[int], sampling: Sampling, row: torch.Tensor) -> set[int]:
    rows = row.expand(100, -1)
    return {pick.token for pick in sample(rows, [sampling] * 100, range(100), [output] * 100)}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=-1.0),
        Sampling(temperature=math.nan),
        Sampling(temperature=math.inf),
        Sampling(top_p=0.0),
        Sampling(top_p=1.5),
        Sampling(top_k=-1),
        Sampling(presence_penalty=math.nan),
        Sampling(frequency_penalty=math.inf),
        Sampling(top_logprobs=-1),
        Sampling(top_logprobs=21),
        Sampling(logit_bias=((2, 1.0),)),
        Sampling(logit_bias=((-1, 1.0),)),
        Sampling(logit_bias=((0, math.inf),)),
    ],
)
def test_what_cannot_be_sampled_is_refused(sampling: Sampling) -> None:
    with pytest.raises(UsageError):
        sample(logits(0.5, 0.5), [sampling], [0], NONE)


def test_counts_must_agree() -> None:
    with pytest.raises(UsageError):
        sample(logits(0.5, 0.5), [GREEDY, GREEDY], [0, 0], NONE * 2)
    with pytest.raises(UsageError):
        sample(logits(0.5, 0.5), [GREEDY], [0], NONE * 2)
