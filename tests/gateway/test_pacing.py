from gateway.pacing import paced
from planner.scheduler import SchedulerLimits

LIMITS = SchedulerLimits(max_step_tokens=1300)


def test_many_requests_are_started_at_q_star() -> None:
    assert paced(LIMITS, 98, 32, requests=1000).prompts_per_step == 10.0


def test_as_many_as_run_in_a_steady_state_may_start_at_once() -> None:
    assert paced(LIMITS, 98, 32, requests=320).prompts_per_step is None
    assert paced(LIMITS, 98, 32, requests=321).prompts_per_step == 10.0


def test_the_pace_ends_when_the_queue_is_short_again() -> None:
    busy = paced(LIMITS, 98, 32, requests=1000)
    assert paced(busy, 98, 32, requests=1000) is busy
    assert paced(busy, 98, 32, requests=5).prompts_per_step is None
