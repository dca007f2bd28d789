from kvpool.client.breaker import Breaker
from kvpool.clock import ManualClock


def test_a_silent_peer_is_asked_once_a_pause() -> None:
    clock = ManualClock()
    breaker = Breaker(clock, min_s=1.0, max_s=3.0)
    assert breaker.allows()
    assert breaker.allows()
    assert breaker.failed() == 1.0
    assert not breaker.allows()
    clock.advance(1.0)
    assert breaker.allows()
    assert not breaker.allows(), "the one try of this pause was claimed"
    assert breaker.failed() == 2.0
    clock.advance(1.5)
    assert not breaker.allows()
    clock.advance(0.5)
    assert breaker.allows()
    assert breaker.failed() == 3.0
    assert breaker.failed() == 3.0


def test_an_answer_ends_the_pause() -> None:
    clock = ManualClock()
    breaker = Breaker(clock, min_s=1.0, max_s=3.0)
    breaker.failed()
    clock.advance(1.0)
    assert breaker.failed() == 2.0
    breaker.succeeded()
    assert breaker.allows()
    assert breaker.allows()
    assert breaker.failed() == 1.0, "the next failure starts from the first pause"


def test_many_that_fail_together_are_one_failure() -> None:
    clock = ManualClock()
    breaker = Breaker(clock, min_s=1.0, max_s=60.0)
    assert all(breaker.allows() for _ in range(8))
    assert [breaker.failed() for _ in range(8)] == [1.0] * 8
    clock.advance(0.5)
    assert breaker.failed() == 0.5, "what is left of the pause"
    clock.advance(0.5)
    assert breaker.failed() == 2.0, "nobody claimed the try, and it failed"
    clock.advance(2.0)
    assert breaker.allows()
    assert breaker.failed() == 4.0
    assert breaker.failed() == 4.0, "the try was one"
