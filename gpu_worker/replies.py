"""What the engine found, as the messages of gpu_worker.proto."""

import json

from moelens.v1 import common_pb2, gpu_worker_pb2

from gpu_worker.config import DTYPE_NAMES
from gpu_worker.head import StepOutput
from gpu_worker.runtime import LoadedModel
from gpu_worker.sampler import TokenLogprob
from gpu_worker.session import BLOCK_TOKENS
from gpu_worker.timing import StepTimes
from gpu_worker.weights import LoadProgress

TIME_FIELDS = tuple(gpu_worker_pb2.StepTimes.DESCRIPTOR.fields_by_name)


def info(model: LoadedModel, kv_epoch: int) -> gpu_worker_pb2.GetInfoResponse:
    """The answer to GetInfo."""
    limits = model.limits
    return gpu_worker_pb2.GetInfoResponse(
        model_name=model.worker.model.resolve().name,
        model_config_json=json.dumps(model.checkpoint.config),
        dtype=DTYPE_NAMES[model.dtype],
        kv_dtype=model.geometry.kv_dtype,
        device=model.device.name,
        vocab_size=limits.vocab_size,
        max_context_tokens=limits.max_context_tokens,
        block_tokens=BLOCK_TOKENS,
        kv_blocks=limits.kv_blocks,
        max_step_tokens=limits.max_step_tokens,
        max_sequences=limits.max_sequences,
        hardware_spec_json=json.dumps(model.hardware.to_json()),
        schedule="pipelined" if model.schedule.pipelined else "sequential",
        preferred_step_tokens=model.preferred_step_tokens,
        kv_epoch=kv_epoch,
        resident_share=model.resident_share,
    )


def load_progress(progress: LoadProgress) -> gpu_worker_pb2.LoadProgress:
    """How far loading is."""
    return gpu_worker_pb2.LoadProgress(
        loaded_bytes=progress.loaded_bytes,
        total_bytes=progress.total_bytes,
        bytes_per_s=progress.bytes_per_s,
        seconds_left=progress.seconds_left,
    )


def step_result(output: StepOutput) -> gpu_worker_pb2.StepResult:
    """One step's result."""
    described = output.logprobs.keys() | output.prompt_logprobs.keys()
    return gpu_worker_pb2.StepResult(
        step_id=output.step_id,
        sequence_ids=[sequence.sequence_id for sequence, _ in output.sampled],
        token_ids=[token_id for _, token_id in output.sampled],
        logprobs=[_logprobs(output, sequence_id) for sequence_id in sorted(described)],
        times=_times(output.times),
        errors=[
            gpu_worker_pb2.SequenceError(sequence_id=sequence_id, message=message)
            for sequence_id, message in output.errors
        ],
    )


def _logprobs(output: StepOutput, sequence_id: int) -> gpu_worker_pb2.SequenceLogprobs:
    message = gpu_worker_pb2.SequenceLogprobs(sequence_id=sequence_id)
    token = output.logprobs.get(sequence_id)
    if token is not None:
        message.token.CopyFrom(_token(token))
    if sequence_id in output.prompt_logprobs:
        message.prompt_start_position, entries = output.prompt_logprobs[sequence_id]
        message.prompt.extend(_token(entry) for entry in entries)
    return message


def _token(entry: TokenLogprob) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        token_id=entry.token_id,
        logprob=entry.logprob,
        top_token_ids=[token_id for token_id, _ in entry.top],
        top_logprobs=[logprob for _, logprob in entry.top],
    )


def _times(times: StepTimes) -> gpu_worker_pb2.StepTimes:
    return gpu_worker_pb2.StepTimes(**{name: getattr(times, name) for name in TIME_FIELDS})
