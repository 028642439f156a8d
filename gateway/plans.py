"""The scheduler's step as the message that the GPU worker executes."""

from collections.abc import Mapping

from moelens.v1.gpu_worker_pb2 import SequenceStart, StepPlan

from gateway.generation import Generation
from planner.request import SequenceId
from planner.scheduler import Step


def step_plan(
    step: Step, generations: Mapping[SequenceId, Generation], timeout_s: float
) -> StepPlan:
    """Struct of arrays: entry i of each chunk field belongs to chunk i.

    A worker that does not get such a step done within `timeout_s` hangs.
    """
    chunks = step.chunks
    return StepPlan(
        step_id=step.step_id,
        released_sequence_ids=step.released,
        starts=[
            _start(generations[chunk.sequence.sequence_id]) for chunk in chunks if chunk.starts
        ],
        chunk_sequence_ids=[chunk.sequence.sequence_id for chunk in chunks],
        chunk_start_positions=[chunk.start_position for chunk in chunks],
        chunk_token_counts=[chunk.token_count for chunk in chunks],
        chunk_samples=[chunk.samples for chunk in chunks],
        chunk_new_block_counts=[len(chunk.new_blocks) for chunk in chunks],
        new_blocks=[block for chunk in chunks for block in chunk.new_blocks],
        timeout_s=timeout_s,
    )


def _start(generation: Generation) -> SequenceStart:
    return SequenceStart(
        sequence_id=generation.sequence_id,
        token_ids=generation.known_ids,
        prompt_tokens=len(generation.work.prompt_ids),
        sampling=generation.work.sampling,
    )
