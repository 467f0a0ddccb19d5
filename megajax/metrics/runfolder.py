"""The folder of a run: what lies where, made and checked at the start."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megajax.config.errors import UserError


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths in `run_dir`; nothing is touched until `create` or a writer does."""

    path: Path

    @classmethod
    def create(cls, run_dir: str | Path) -> "RunFolder":
        """Make `run_dir` and prove that files can be written there; UserError if not."""
        path = Path(run_dir).expanduser()
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path, prefix=".writable-"):
                pass
        except OSError as error:
            raise UserError(
                f"run_dir {path} cannot be written: {error.strerror or error}. "
                "Set run_dir to a folder you can write to, with space left on its disk."
            ) from error
        return cls(path)

    @property
    def config_yaml(self) -> Path:
        return self.path / "config.yaml"

    @property
    def config_diff(self) -> Path:
        return self.path / "config.diff"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def loss_plot(self) -> Path:
        return self.path / "loss.png"

    def write_config(self, yaml: str, diff: str) -> None:
        """Write config.yaml (the whole config) and config.diff (what differs from the defaults)."""
        write_atomically(self.config_yaml, yaml)
        write_atomically(self.config_diff, diff)


def write_atomically(path: Path, text: str) -> None:
    """Write `text` (UTF-8) so that readers, and a machine that loses power, see the old file or the new, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
