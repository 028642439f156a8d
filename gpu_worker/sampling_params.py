"""SamplingParams as they come over the wire: checked, and turned into the sampler's parameters."""

from moelens.v1 import common_pb2

from gpu_worker.errors import PlanError
from gpu_worker.sampler import Sampling


def check_sampling(params: common_pb2.SamplingParams, vocab_size: int, where: str) -> None:
    """PlanError where a parameter is out of range; comparisons are written so that NaN fails."""
    ranges = {
        "temperature": (0.0, 1e6),
        "top_p": (0.0, 1.0),
        "min_p": (0.0, 1.0),
        "frequency_penalty": (-2.0, 2.0),
        "presence_penalty": (-2.0, 2.0),
    }
    for name, (low, high) in ranges.items():
        value = getattr(params, name)
        if not low <= value <= high:
            raise PlanError(f"{where}.{name}", f"must be {low:g} to {high:g}, is {value}")
    if params.HasField("repetition_penalty") and not 0 < params.repetition_penalty < 1e6:
        raise PlanError(
            f"{where}.repetition_penalty", f"must be positive, is {params.repetition_penalty}"
        )
    if not params.HasField("seed"):
        raise PlanError(f"{where}.seed", "must be set")
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token_id in ids:
            if token_id >= vocab_size:
                raise PlanError(
                    f"{where}.{name}",
                    f"token id {token_id} is outside the vocabulary of {vocab_size}",
                )
    for token_id, bias in params.logit_bias.items():
        if not -100 <= bias <= 100:
            raise PlanError(f"{where}.logit_bias", f"token {token_id} has {bias}: not -100 to 100")


def sampling_of(params: common_pb2.SamplingParams) -> Sampling:
    """The sampler's parameters of checked SamplingParams, unset ones with their defaults."""
    return Sampling(
        seed=params.seed,
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_k=params.top_k,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        min_p=params.min_p,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=(
            params.repetition_penalty if params.HasField("repetition_penalty") else 1.0
        ),
        logit_bias=dict(params.logit_bias),
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
    )
