"""Finding the request that makes steps fail, by halving.

All sequences of the failed step are suspects. Some of them go on trial: they run, the others are
held back. When every one of them got a token the fault lies with the others; when a step fails
again it lies with them. A suspect that is left alone and fails alone is the culprit. The first
trial is without the newest sequences, since what ran well before is seldom to blame.
"""

from collections.abc import Collection, Sequence

from planner.request import SequenceId


class Search:
    """The suspects of one failed step.

    `remaining` may hold the culprit, `on_trial` may run; when the latter is empty the search is
    over, with a `culprit` or without. Where a failure may be bad luck (`doubtful`), a suspect has
    to fail alone twice, and the others have to run well without it.
    """

    def __init__(
        self,
        suspects: Sequence[SequenceId],
        newest: Collection[SequenceId],
        doubtful: bool = False,
    ) -> None:
        """`suspects` oldest first."""
        self.remaining = list(suspects)
        self.culprit: SequenceId | None = None  # once it is known
        self._others = list(suspects)  # than the one that fails alone
        self._doubtful = doubtful
        self._failed_alone = 0
        self._any_acquitted = False
        self._is_control = False  # the trial is of the others
        older = [s for s in self.remaining if s not in newest]
        self._begin_trial(older if 0 < len(older) < len(self.remaining) else self._first_half())

    def may_run(self, sequence_id: SequenceId) -> bool:
        """Whether a sequence is on trial."""
        return sequence_id in self.on_trial

    def acquit(self, sequence_id: SequenceId) -> bool:
        """One on trial got a token, or has left; True when that ends the trial."""
        self._awaited.discard(sequence_id)
        if self._awaited:
            return False
        self._any_acquitted = True
        if self._is_control:
            self.culprit = self.remaining[0] if self.remaining else None
            self._begin_trial([])
        else:
            self.remaining = [s for s in self.remaining if s not in self.on_trial]
            self._begin_trial(self._first_half())
        return True

    def convict(self) -> None:
        """A step failed during the trial."""
        if self._is_control:
            self._begin_trial([])  # it fails whoever runs
            return
        self.remaining = list(self.on_trial)
        if len(self.remaining) > 1:
            self._begin_trial(self._first_half())
            return
        self._failed_alone += 1
        if self._doubtful and self._failed_alone < 2:
            self._begin_trial(self.remaining)
        elif self._doubtful and not self._any_acquitted:
            self._is_control = True
            self._begin_trial([s for s in self._others if s not in self.remaining])
        else:
            self.culprit = self.remaining[0]
            self._begin_trial([])

    def leave(self, sequence_id: SequenceId) -> bool:
        """A sequence has ended for other reasons; True when that ends the trial."""
        self._others = [s for s in self._others if s != sequence_id]
        ended = self.acquit(sequence_id) if sequence_id in self.on_trial else False
        self.remaining = [s for s in self.remaining if s != sequence_id]
        return ended

    def _first_half(self) -> list[SequenceId]:
        return self.remaining[: (len(self.remaining) + 1) // 2]

    def _begin_trial(self, on_trial: Sequence[SequenceId]) -> None:
        self.on_trial = list(on_trial)
        self._awaited = set(on_trial)
