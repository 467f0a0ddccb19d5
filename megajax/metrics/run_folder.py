"""The folder of a run: its files, and its creation."""

import os
import tempfile
from pathlib import Path

from megajax.config.errors import UserError
from megajax.metrics.event_hook import LOG, POSITION
from megajax.metrics.line_file import FileDeleted
from megajax.storage.write_errors import write_fault


class RunFolder:
    """Paths in `run_dir`."""

    def __init__(self, path: Path):
        self.path = path
        self.config_yaml, self.config_diff = path / "config.yaml", path / "config.diff"
        self.metrics, self.events = path / "metrics.jsonl", path / "events.jsonl"
        self.superseded = path / "metrics.superseded.jsonl"
        """Lines of steps that a resumed run has repeated."""
        self.layers = path / "layers.jsonl"
        """Lists that layers report, for example the tokens of each expert."""
        self.report, self.loss_plot = path / "report.html", path / "loss.png"
        self.layers_plot = path / "layers.png"
        self.hook_log, self.hook_position = path / LOG, path / POSITION
        self.checkpoints, self.profile, self.tensorboard = path / "checkpoints", path / "profile", path / "tensorboard"

    @classmethod
    def create(cls, run_dir: str | Path) -> "RunFolder":
        """Create `run_dir`. Raises UserError unless files can be written there, and for what is in the place of one."""
        path = Path(run_dir).expanduser()
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path, prefix=".writable-"):
                pass
        except OSError as error:
            raise UserError(
                f"run_dir {path} can't be written: {write_fault(error)}. Set run_dir to a folder that can be written."
            ) from error
        folder = cls(path)
        folders = {folder.checkpoints, folder.profile, folder.tensorboard}
        for name in [*vars(folder).values()]:
            wanted, fits = ("a folder", name.is_dir) if name in {path, *folders} else ("a regular file", name.is_file)
            if name.exists() and not fits():
                raise UserError(f"{name} is in the way: the run needs {wanted} there. Move it, or set another run_dir")
        return folder

    def demand_config(self) -> None:
        """Raises FileDeleted if config.yaml no longer exists, without which nobody can use the run."""
        if not self.config_yaml.exists():
            raise FileDeleted(f"{self.config_yaml} was deleted while the run trained; the same command writes it again")

    def write_config(self, yaml: str, diff: str) -> None:
        """Write config.yaml (the whole config) and config.diff (its differences from the defaults)."""
        write_atomically(self.config_yaml, yaml)
        write_atomically(self.config_diff, diff)


def write_atomically(path: Path, text: str) -> None:
    """Write `text` (UTF-8) so that readers see the old file or the new one, even after a power failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_output_file(path: Path, text: str) -> None:
    """`write_atomically` for a path from the command line. Raises UserError if it can't be written."""
    try:
        write_atomically(path, text)
    except OSError as error:
        raise UserError(f"{path} can't be written: {write_fault(error)}") from error
