"""What a batch was and how it went, beside its output: `<output>.manifest.json`."""

import json
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from gateway.batch.runner import Progress

SCHEMA = "moe-lens/batch-manifest/1"


@dataclass
class Manifest:
    """Rows are those of all runs over this output; tokens and seconds those of the last run."""

    input: str
    output: str
    server: str
    model: str
    status: str = "running"  # then "done", "failed" (see `problem`) or "interrupted"
    problem: str = ""
    started_at: str = ""
    finished_at: str = ""
    succeeded_rows: int = 0
    failed_rows: int = 0
    resumed_rows: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    elapsed_s: float = 0.0
    tokens_per_s: float = 0.0
    predicted_tokens_per_s: float | None = None
    schema: str = SCHEMA

    def begin(self, path: Path) -> None:
        """Write it for a run that starts now."""
        self.started_at = _now()
        self.write(path)

    def finish(self, path: Path, progress: Progress, status: str, problem: str = "") -> None:
        """Write it for a run that ends now."""
        self.status, self.problem, self.finished_at = status, problem, _now()
        self.resumed_rows = progress.resumed
        self.prompt_tokens = progress.prompt_tokens
        self.generated_tokens = progress.generated_tokens
        self.elapsed_s = progress.elapsed_s
        self.tokens_per_s = progress.tokens_per_s
        self.write(path)

    def write(self, path: Path) -> None:
        """Replace the file at once: a reader sees the old or the new one."""
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("w") as file:
            json.dump(asdict(self), file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


def manifest_path(output: Path) -> Path:
    """Where the manifest of an output lies."""
    return output.with_name(output.name + ".manifest.json")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
