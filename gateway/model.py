"""The model that this gateway serves: its files, and what the GPU worker says of it."""

import json
from pathlib import Path

from moelens.v1 import gateway_pb2 as messages

from gateway.tokenizer import Tokenizer, TokenizerError
from gateway.validation import PromptLimits, Validator
from gateway.worker import WorkerInfo
from planner.spec import ModelSpec


class ServedModel:
    """One checkpoint directory under the name that clients use."""

    def __init__(self, directory: Path, name: str, limits: PromptLimits) -> None:
        """Raises TokenizerError or planner.errors.InvalidInputError when a file is unusable."""
        self.directory = directory
        self.name = name or directory.resolve().name
        self.tokenizer = Tokenizer.from_directory(directory)
        self.spec = ModelSpec.from_directory(directory)
        if self.tokenizer.size > self.spec.vocab_size:
            raise TokenizerError(
                f"{directory / 'tokenizer.json'} has ids up to {self.tokenizer.size - 1}, the "
                f"model's vocabulary ends at {self.spec.vocab_size - 1}"
            )
        self.validator: Validator | None = None  # once the worker is known
        self._limits = limits
        self._info: WorkerInfo | None = None

    def adopt(self, info: WorkerInfo) -> None:
        """Take over the limits of a worker. ValueError when it runs another model."""
        served = json.loads(info.model_config_json or "{}")
        for key, expected in (("vocab_size", self.spec.vocab_size),):
            if key in served and served[key] != expected:
                raise ValueError(
                    f"the GPU worker's model has {key} {served[key]}, {self.name} has {expected}: "
                    "start both with the same --model"
                )
        self._info = info
        self.validator = Validator(self.name, info, self.tokenizer, self._limits)

    def description(self) -> messages.GetModelResponse:
        """What GetModel answers, once the worker is known."""
        info = self._info
        assert info is not None
        spec = info.stored(self.spec)
        return messages.GetModelResponse(
            model=self.name,
            family=spec.family,
            dtype=info.dtype,
            kv_dtype=info.kv_dtype,
            device=info.device,
            vocab_size=info.vocab_size,
            max_context_tokens=info.context_tokens,
            eos_token_ids=sorted(self.tokenizer.special.eos_ids),
            total_parameters=spec.total_parameters,
            active_parameters=spec.active_parameters,
            weights_bytes=int(spec.weights_bytes),
            kv_bytes_per_token=int(spec.kv_bytes_per_token),
            kv_capacity_tokens=info.kv_capacity_tokens,
            has_chat_template=self.tokenizer.chat_template is not None,
        )
