"""The share of a step in which a device waits for the host."""

import time
from collections import abc
from typing import Any

from megajax.inference.engine import Engine, end_tokens_of
from megajax.inference.request import Request, Sampled, Step
from megajax.inference.sampling.choose import Program
from megajax.inference.sampling.chooser import RowChooser
from megajax.inference.sampling_settings import Sampling
from megajax.inference.step_arrays import Bucket, pack
from megajax.tokenizers.byte import ByteTokenizer
from megajax.tokenizers.config import ByteTokenizerConfig

ROWS, ANSWER, LENGTH, BLOCK, CHUNK, TILE = 64, 300, 1024, 16, 512, 32


def host_share(*, milliseconds: tuple[float, ...] = (5.0, 10.0, 20.0)) -> dict[str, Any]:
    """The share of a step in which a device would wait for the host, with 64 decoding rows.

    The engine runs with the real scheduler, arrays and texts, and a device that only takes its time: a step begins when
    it was dispatched and the previous one has ended. Llama 3 8B takes about 10 ms for 64 rows on an H100, by bandwidth.

    look_ahead   steps are dispatched before the tokens of the previous one are read, as by default
    in_turn      `inference.look_ahead=false`
    host         milliseconds of the engine's thread for each step
    """
    return {f"step of {length:g} ms": of_length(length / 1e3) for length in milliseconds}


def of_length(seconds: float) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, ahead in (("look_ahead", True), ("in_turn", False)):
        device, tokenizer = TimedDevice(seconds), ByteTokenizer(ByteTokenizerConfig())
        engine = Engine(device, tokenizer=tokenizer, end_tokens=end_tokens_of(tokenizer), look_ahead=ahead)
        for number in range(ROWS):
            sampling = Sampling(max_tokens=ANSWER, temperature=1.0, seed=number, stop=("\n\n\n",))
            engine.submit(Request(identifier=str(number), prompt=(65,) * 64, sampling=sampling, deliver=lambda _: None))
        for _ in range(ROWS * TILE // CHUNK + 20):  # Prompts first.
            engine.step()
        before, idle, host = device.ended, device.idle, engine.statistics().scheduler_seconds_total
        for _ in range(200):
            engine.step()
        figures[name] = round((device.idle - idle) / (device.ended - before), 4)
        figures["host"] = round(1e3 * (engine.statistics().scheduler_seconds_total - host) / 200, 2)
    return figures


class TimedDevice:
    """Steps of a given length. Arrays are packed as for a model."""

    rows, replicas, chunk, tile, block, blocks = ROWS, 1, CHUNK, TILE, BLOCK, ROWS * LENGTH // BLOCK
    length, top, vocabulary, drafts, prefix_sharing, memory = LENGTH, 20, 257, 0, True, 0

    def __init__(self, seconds: float):
        self.seconds, self.steps, self.idle = seconds, 0, 0.0
        self.ended = time.perf_counter()
        """When the last dispatched step ends."""
        self.chooser = RowChooser(Program.SAMPLED, self.vocabulary)

    def start(self, work: abc.Sequence[Step | None]) -> "TimedStep":
        bucket = Bucket(ROWS, CHUNK // TILE if any(step and step.prompts for step in work) else 0, TILE)
        for step in work:
            pack(step, bucket, block=BLOCK, width=LENGTH // BLOCK)
        return TimedStep(self, work, bucket)


class TimedStep:
    """A step of a `TimedDevice`. The tokens are chosen at the end of its time."""

    def __init__(self, device: TimedDevice, work: abc.Sequence[Step | None], bucket: Bucket):
        self._device, self._work, self._bucket = device, work, bucket
        begin = max(time.perf_counter(), device.ended)
        device.idle += begin - device.ended
        device.ended = self._ends = begin + device.seconds
        device.steps += 1

    def choose(self) -> None:
        device = self._device
        device.chooser.inputs(self._work, self._bucket)
        late = max(0.0, time.perf_counter() - self._ends)
        device.idle, device.ended, self._ends = device.idle + late, device.ended + late, self._ends + late

    def results(self) -> list[list[Sampled]]:
        time.sleep(max(0.0, self._ends - time.perf_counter()))
        return [
            [Sampled(97 + self._device.steps % 26, -0.5) for _ in step.parts()] if step else [] for step in self._work
        ]
