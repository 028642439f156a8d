"""How long a step may take before the worker counts as hung."""

from dataclasses import dataclass

# Times what is predicted, or what the longest step took: other load on the machine, a page fault.
FACTOR = 20.0
# What was seen long ago counts less and less.
FADING = 0.99
# The worker ends itself after so many times the bound: a false alarm costs it the weights.
SELF_END_FACTOR = 3.0


@dataclass
class Patience:
    """Bound of one step, between `least_s` and `most_s`; the latter until something is known."""

    least_s: float
    most_s: float
    predicted_step_s: float | None = None  # the planner's, for a full step
    _longest_s: float = 0.0

    def note(self, step_s: float) -> None:
        """A step took so long."""
        self._longest_s = max(step_s, self._longest_s * FADING)

    @property
    def step_s(self) -> float:
        """A worker silent for longer during a step is given up."""
        if self.predicted_step_s is None and not self._longest_s:
            return self.most_s
        expected_s = max(self.predicted_step_s or 0.0, self._longest_s)
        return min(max(FACTOR * expected_s, self.least_s), self.most_s)

    @property
    def worker_step_s(self) -> float:
        """After so long a worker whose step does not end should end itself."""
        return SELF_END_FACTOR * self.step_s
