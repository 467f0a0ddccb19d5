"""A program that behaves like a training run and is ready in a fraction of a second: it does not import jax.

Ten steps that all processes take together, a checkpoint every five, beats, resume from the newest checkpoint. FAULTS in
the environment makes something happen: KIND:PROCESS@STEP#ATTEMPT, separated by commas; attempt * is every one.
"""

import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from megajax.faults.beats import Beat, attempt_number, beats_folder

STEPS, EVERY = 10, 5


class Process:
    """One process of the run."""

    def __init__(self, run_dir: Path):
        self.run_dir, self.attempt = run_dir, attempt_number()
        self.index = int(os.environ.get("MEGAJAX_PROCESS_ID") or os.environ.get("SLURM_PROCID", "0"))
        self.count = int(os.environ.get("MEGAJAX_NUM_PROCESSES") or os.environ.get("SLURM_NTASKS", "1"))
        self.slot = int(os.environ.get("MEGAJAX_LOCAL_RANK", self.index))
        self.folder = beats_folder()
        self.phase: tuple[str, int | None, float] = ("setup", None, time.monotonic())
        self.step = self.committed = max((int(path.name) for path in self.checkpoints.glob("*")), default=0)
        self.over = threading.Event()
        self.beating = threading.Thread(target=self.beats, daemon=True)
        self.meeting = run_dir / f"attempt_{self.attempt}"
        self.meeting.mkdir(parents=True, exist_ok=True)

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    def beat(self, **last: object) -> None:
        """Write a beat; last: failure and code."""
        if self.folder is not None:
            name, step, since = self.phase
            Beat(
                process=self.index, pid=os.getpid(), host=os.uname().nodename, time=time.time(),
                run_dir=str(self.run_dir), step=self.step, committed=self.committed or None, phase=name,
                phase_step=step, phase_seconds=time.monotonic() - since, **last,
            ).write(self.folder)  # fmt: skip

    def beats(self) -> None:
        while not self.over.wait(0.1):
            self.beat()

    def enter(self, name: str, step: int | None) -> None:
        self.phase = name, step, time.monotonic()

    def fail(self, why: str, code: int) -> None:
        """End with a last beat."""
        self.over.set()
        time.sleep(0.05)
        self.beat(failure=why, code=code)
        print(f"failed: {why}", file=sys.stderr, flush=True)
        os._exit(code)

    def meet(self, step: int) -> None:
        """Wait for the others, as a collective does; the loss of one process ends all, as in gloo."""
        (self.meeting / f"{step}.{self.index}").touch()
        watchdog, began = float(os.environ.get("FAKE_WATCHDOG", "inf")), time.monotonic()
        while len(list(self.meeting.glob(f"{step}.*"))) < self.count:
            if list(self.meeting.glob("dead")):
                self.fail("JaxRuntimeError: Gloo all_reduce failed: Connection closed by peer", 1)
            if time.monotonic() - began > watchdog:
                self.fail(f"hang: step {step} takes longer than {watchdog:g} s", 124)
            time.sleep(0.01)

    def fault(self, step: int) -> None:
        """What FAULTS has for this process at this step of this attempt."""
        for fault in filter(None, os.environ.get("FAULTS", "").split(",")):
            kind, _, rest = fault.partition(":")
            place, _, attempt = rest.partition("#")
            if place == f"{self.slot}@{step}" and attempt in ("*", str(self.attempt)):
                self.inject(kind)

    def inject(self, kind: str) -> None:
        match kind:
            case "kill" | "stop" | "abort":
                self.over.set()
                self.beating.join()
                self.beat()  # With the position.
                if kind == "kill":
                    (self.meeting / "dead").touch()
                number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "abort": signal.SIGABRT}[kind]
                os.kill(os.getpid(), number)
            case "stuck":
                time.sleep(600)
            case "late" | "absent":
                time.sleep(1.0 if kind == "late" else 10.0)
            case _:
                self.wait_for_others()
                self.fail(f"fault {kind}", int(kind))

    def wait_for_others(self) -> None:
        """Until their beats say that they wait for this process: then none is behind, on a slow machine either."""
        others, end = [index for index in range(self.count) if index != self.index], time.monotonic() + 60

        def waits(index: int) -> bool:
            beat = self.folder and Beat.read(self.folder, index)
            return beat is not None and (beat.phase, beat.phase_step) == ("step", self.step + 1)

        while self.folder is not None and not all(map(waits, others)) and time.monotonic() < end:
            time.sleep(0.01)

    def run(self) -> None:
        if os.environ.get("MEGAJAX_ELASTIC") == "1":
            print("elastic", flush=True)
        self.beat()
        self.beating.start()
        while self.step < STEPS:
            step = self.step + 1
            self.enter("data_wait", step)
            self.fault(step)
            self.enter("step", step)
            self.meet(step)
            time.sleep(0.02)
            if self.index == 0:
                with (self.run_dir / "losses.txt").open("a") as file:
                    print(self.attempt, step, 1 / step, file=file)
                print(f"step {step}", flush=True)
            self.step = step
            if step % EVERY == 0:
                self.enter("save", step)
                self.meet(1000 + step)
                if self.index == 0:
                    (self.checkpoints / str(step)).mkdir(parents=True)
                while not (self.checkpoints / str(step)).exists():
                    time.sleep(0.01)
                self.committed = step
        self.over.set()
        self.beating.join()
        self.enter("finish", None)
        self.beat()  # As in training, the last one says that no other is due.
        self.fault(0)


def stacks(process: Process) -> None:
    """Answer SIGUSR2 as training does."""

    def write(number: int, frame: object) -> None:
        folder = process.run_dir / "hangs"
        folder.mkdir(exist_ok=True)
        (folder / f"process_{process.index}.txt").write_text("".join(traceback.format_stack()))

    signal.signal(signal.SIGUSR2, write)


if __name__ == "__main__":
    this = Process(Path(sys.argv[1]))
    stacks(this)
    if os.environ.get("STOPS"):
        signal.signal(signal.SIGTERM, lambda *_: os._exit(int(os.environ["STOPS"])))
    this.run()
