"""Calls and timers of a thread that waits for something else."""

import weakref
from functools import partial

from kvpool.transfer.calls import Calls, weakly


def test_posted_calls_come_in_order_and_wake() -> None:
    wakes: list[int] = []
    calls = Calls(lambda: wakes.append(1))
    ran: list[int] = []
    assert calls.sleep_s() > 1
    for number in range(3):
        assert calls.post(partial(ran.append, number))
    assert len(wakes) == 3
    assert calls.sleep_s() == 0
    for call in calls.due():
        call()
    assert ran == [0, 1, 2]
    assert calls.due() == []


def test_timers_come_by_their_time_and_only_the_earliest_wakes() -> None:
    wakes: list[int] = []
    calls = Calls(lambda: wakes.append(1))
    ran: list[str] = []
    calls.call_later(0.0, lambda: ran.append("now"))
    calls.call_later(1000.0, lambda: ran.append("later"))
    calls.call_later(-1.0, lambda: ran.append("past"))
    assert len(wakes) == 2
    for call in calls.due():
        call()
    assert ran == ["past", "now"]
    assert 10 < calls.sleep_s() <= 60


def test_what_was_posted_before_the_stop_is_kept_and_nothing_else() -> None:
    calls = Calls(lambda: None)
    ran: list[str] = []
    assert calls.post(lambda: ran.append("before"))
    calls.call_later(0.0, lambda: ran.append("timer"))
    calls.stop()
    assert not calls.post(lambda: ran.append("after"))
    calls.call_later(0.0, lambda: ran.append("late timer"))
    for call in calls.due():
        call()
    assert ran == ["before"]
    assert calls.due() == []
    assert calls.sleep_s() > 1


def test_a_weak_call_keeps_nothing_alive() -> None:
    class Target:
        def __init__(self) -> None:
            self.called = 0

        def method(self) -> None:
            self.called += 1

    target = Target()
    gone = weakref.ref(target)
    call = weakly(target.method)
    call()
    assert target.called == 1
    del target
    assert gone() is None
    call()
