"""The file of a run folder that says which reference model the run has."""

import json
from dataclasses import dataclass
from pathlib import Path

from megajax.config.errors import UserError
from megajax.mesh.processes.peers import Peers
from megajax.metrics.runfolder import write_atomically
from megajax.training.reference import Reference

UNKNOWN = "unknown"
"""The checksum that no weights have."""


@dataclass(frozen=True)
class ReferenceFile:
    """`reference.json` in the run folder."""

    path: Path
    resumes: bool
    """Whether the run continues from a checkpoint of its own: its weights are no longer those of the reference."""

    def expected(self) -> str | None:
        """The checksum that a run that resumes has recorded, on all processes; None for a new run."""
        if not self.resumes:
            return None
        peers, checksum = Peers("reference file"), UNKNOWN
        if peers.first and self.path.exists():
            try:
                checksum = str(json.loads(self.path.read_text(encoding="utf-8"))["weights"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise UserError(f"{self.path}: cannot be read ({error}); delete it and start a new run") from error
        return peers.broadcast(checksum)

    def record(self, reference: Reference | None) -> None:
        """Write the file of a new run."""
        if reference is not None and not self.resumes and Peers("reference file written").first:
            content = {"weights": reference.weights, "files": [str(file) for file in reference.files]}
            write_atomically(self.path, f"{json.dumps(content, indent=1)}\n")
