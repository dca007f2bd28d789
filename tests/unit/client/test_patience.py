"""What a read waits for silent servers adds up to its budget at most."""

from kvpool.client.patience import Patience, Step

BUDGET_S = 0.25


def test_servers_that_are_silent_one_after_the_other_cost_the_budget_at_most() -> None:
    patience = Patience(BUDGET_S)
    waited_s = 0.0
    for _ in range(100):
        share_s = patience.share_s()
        assert share_s >= 0.0
        patience.spend(share_s, share_s)
        waited_s += share_s
    assert waited_s <= BUDGET_S
    first_s = Patience(BUDGET_S).share_s()
    assert first_s >= BUDGET_S / 2, "who is asked first has a chance"


def test_what_a_server_took_that_answered_costs_nothing() -> None:
    patience = Patience(BUDGET_S)
    assert patience.share_s() == patience.share_s()


def test_a_short_wait_leaves_more_than_a_long_one() -> None:
    short, long = Patience(BUDGET_S), Patience(BUDGET_S)
    short.spend(0.001, short.share_s())
    long.spend(0.1, long.share_s())
    assert BUDGET_S / 2 > short.share_s() > long.share_s() > 0


def test_what_the_machine_adds_to_a_wait_is_not_paid_for() -> None:
    """Else the next replica, which may be well, would have nothing."""
    patience = Patience(BUDGET_S)
    patience.spend(30.0, patience.share_s())
    assert patience.share_s() == BUDGET_S / 4


def test_the_steps_of_a_read_share_its_budget() -> None:
    match = Patience(BUDGET_S)
    match.spend(1.0, match.share_s())
    lease = match.begin(Step.LEASE)
    assert lease.share_s() == BUDGET_S / 4
    lease.spend(1.0, lease.share_s())
    load = lease.begin(Step.LOAD)
    assert load.share_s() == BUDGET_S / 8


def test_who_does_a_step_again_reads_anew() -> None:
    match = Patience(BUDGET_S)
    match.spend(1.0, match.share_s())
    lease = match.begin(Step.LEASE)
    again = match.begin(Step.LEASE)
    assert again.share_s() == BUDGET_S / 2
    assert lease.begin(Step.LOAD).share_s() == BUDGET_S / 4
    assert lease.begin(Step.LOAD).share_s() == BUDGET_S / 2
    assert again.begin(Step.LOAD).share_s() == BUDGET_S / 2
