"""What can go wrong in the GPU worker, each with what was found and what would be right."""

from collections.abc import Sequence


class CheckpointError(Exception):
    """A checkpoint that cannot be loaded; every problem that was found, one a line."""

    def __init__(self, directory: object, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(f"cannot load the checkpoint in {directory}:{lines}")


class ConfigurationError(ValueError):
    """A setting of the worker that cannot be used."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        super().__init__(f"{field}: {message}")


class MemoryShortage(Exception):
    """What was asked for does not fit; the items add up to what is needed."""

    def __init__(
        self, what: str, items_bytes: Sequence[tuple[str, int]], available_bytes: int
    ) -> None:
        self.items_bytes = list(items_bytes)
        needed_bytes = sum(n for _, n in items_bytes)
        lines = "".join(f"\n  {n / 1e9:10.3f} GB  {name}" for name, n in items_bytes)
        super().__init__(
            f"{what}: {needed_bytes / 1e9:.3f} GB needed, "
            f"{available_bytes / 1e9:.3f} GB available:{lines}"
        )


class PlanError(ValueError):
    """A StepPlan that contradicts the session; nothing of it was executed."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        self.message = message
        super().__init__(f"{field}: {message}")


class LoadingStopped(Exception):
    """The worker was told to stop while it loaded."""


class CpuWorkerRefused(Exception):
    """The CPU worker cannot hold the KV cache that was asked for; its own words."""


# How torch's allocators put it where they raise a plain RuntimeError.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


def is_out_of_memory(error: Exception) -> bool:
    """Whether the device (or the host, for device cpu) had no memory for a step."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in _NO_MEMORY)
