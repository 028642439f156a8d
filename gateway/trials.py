"""The search for the request that makes steps fail, carried out on the engine's requests.

While it is under way the scheduler knows those on trial alone; the others are held back, and come
back with all their tokens.
"""

from collections.abc import Callable, Mapping, Sequence

import structlog

from gateway.culprit import Search
from gateway.generation import Generation
from planner.request import SequenceId
from planner.scheduler import Chunk, Scheduler

log = structlog.get_logger("trials")


class Trials:
    """At most one search. `arrange` makes the scheduler follow it, and has to be called after
    anything that may have changed who is on trial."""

    def __init__(self) -> None:
        self._search: Search | None = None
        self._held: set[SequenceId] = set()
        self._changed = False

    @property
    def under_way(self) -> bool:
        """Whether somebody is searched for."""
        return self._search is not None

    def begin(self, chunks: Sequence[Chunk], doubtful: bool) -> None:
        """Suspect all sequences of a step; `doubtful` where it may have failed by bad luck."""
        suspects = sorted((chunk.sequence for chunk in chunks), key=lambda s: s.order)
        newest = {chunk.sequence.sequence_id for chunk in chunks if chunk.starts}
        ids = [sequence.sequence_id for sequence in suspects]
        self._search = Search(ids, newest, doubtful)
        self._changed = True
        log.warning("search for a culprit", suspects=len(ids), newest=len(newest))

    def end(self) -> None:
        """Whoever was held back is the caller's to admit again."""
        self._search = None
        self._held.clear()

    def acquit(self, sequence_id: SequenceId) -> None:
        """It got a token."""
        if self._search is not None and self._search.may_run(sequence_id):
            self._changed |= self._search.acquit(sequence_id)

    def leave(self, sequence_id: SequenceId) -> None:
        """It has ended."""
        self._held.discard(sequence_id)
        if self._search is not None:
            self._changed |= self._search.leave(sequence_id)

    def convict(self) -> None:
        """A step failed."""
        if self._search is not None:
            self._search.convict()
            self._changed = True

    def culprit(self) -> SequenceId | None:
        """Once, when it has been found."""
        if self._search is None or self._search.culprit is None:
            return None
        found, self._search.culprit = self._search.culprit, None
        return found

    def hold(self, generation: Generation, scheduler: Scheduler) -> None:
        """Take it from the scheduler for now. What steps in flight bring of it is not used."""
        scheduler.cancel(generation.sequence_id)
        generation.renew_sequence()
        self._held.add(generation.sequence_id)

    def arrange(
        self,
        generations: Mapping[SequenceId, Generation],
        scheduler: Scheduler,
        admit: Callable[[Generation], None],
    ) -> None:
        """Those on trial, or everybody when there is no search, are known to the scheduler."""
        if not self._changed:
            return
        self._changed = False
        if self._search is not None and not self._search.on_trial:
            self._search = None
            log.info("search ended")
        for sequence_id, generation in list(generations.items()):
            runs = self._search is None or self._search.may_run(sequence_id)
            if runs and sequence_id in self._held:
                self._held.remove(sequence_id)
                admit(generation)
            elif not runs and sequence_id not in self._held:
                self.hold(generation, scheduler)
