"""A run over streamed files, stopped in the middle of a mixture and resumed with another number of processes."""

from pathlib import Path

import gangs
import pytest
from test_streams import write

NUMBERS = [" ".join(str((7 * text + place) % 60) for place in range(5 + text % 30)) for text in range(400)]


@pytest.mark.slow
def test_a_mixture_goes_on_with_other_processes(tmp_path: Path) -> None:
    """The rows are the same: every step has the loss of a run that was never stopped."""
    write(tmp_path / "web.parquet", NUMBERS)
    write(tmp_path / "code.jsonl", NUMBERS[::-1])
    files = f"--data.paths=0.7,{tmp_path}/web.parquet,0.3,{tmp_path}/code.jsonl"
    data = ["--data.type=Stream", files, f"--data.valid_paths={tmp_path}/code.jsonl", "--data.lanes=4"]
    with gangs.started(tmp_path) as start:

        def train(processes: int, name: str, *settings: str) -> dict[int, float]:
            devices = f"--devices=cpu:{2 // processes}"
            command = [*gangs.TRAIN, f"--config={gangs.CONFIG}", "--batch.micro_size=2", "--parallel.data=2", devices]
            launcher = gangs.launcher(processes=processes) if processes > 1 else ()
            run = tmp_path / name
            gang = start(
                *launcher, *command, f"--run_dir={run}", *data, f"--data.cache_dir={tmp_path / name}-c", *settings
            )
            assert gang.wait(300) == 0, gang.text
            return gangs.losses(run)

        whole = train(1, "whole")
        train(2, "moved", "--resilience.exit_after_steps=3")
        assert train(1, "moved") == pytest.approx(whole, rel=1e-5)
        assert list(whole) == [1, 2, 3, 4, 5, 6]
