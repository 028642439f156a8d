"""How many tokens a step has: fewer after the device ran out of memory, more again later."""

from dataclasses import replace

from planner.scheduler import Scheduler

FEWEST_TOKENS = 16
STEPS_BEFORE_GROWTH = 1000


class StepSize:
    """Changes a scheduler's limit; what it was before the first shrinking is the most."""

    def __init__(self) -> None:
        self._most_tokens: int | None = None  # None: not shrunk
        self._good_steps = 0

    def shrink(self, scheduler: Scheduler) -> bool:
        """Half as many from now on; False when there can be no fewer. Nothing may be running."""
        now = scheduler.limits.max_step_tokens
        smaller = max(now // 2, FEWEST_TOKENS)
        if smaller >= now:
            return False
        self._most_tokens = self._most_tokens or now
        self._set(scheduler, smaller)
        return True

    def note_success(self, scheduler: Scheduler) -> None:
        """A step went well; after many of them, twice as many tokens."""
        if self._most_tokens is None:
            return
        self._good_steps += 1
        if self._good_steps >= STEPS_BEFORE_GROWTH:
            larger = min(2 * scheduler.limits.max_step_tokens, self._most_tokens)
            self._set(scheduler, larger)
            if larger == self._most_tokens:
                self._most_tokens = None

    def _set(self, scheduler: Scheduler, tokens: int) -> None:
        scheduler.limits = replace(scheduler.limits, max_step_tokens=tokens)
        self._good_steps = 0
