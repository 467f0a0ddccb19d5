"""The number of rows of each step: a pure function of the rows read before it."""

from typing import NamedTuple

from megajax.config.errors import UserError
from megajax.training.config import BatchConfig


class BatchSize(NamedTuple):
    """The batch size of a step."""

    rows: int
    """Rows over all devices."""
    microbatches: int


class BatchSizes:
    """The batch sizes of a run on `replicas` data-parallel devices.

    A ramp with thresholds in tokens needs sequence_length.
    """

    def __init__(self, cfg: BatchConfig, replicas: int, *, sequence_length: int | None = None):
        self.cfg, self.unit = cfg, cfg.micro_size * replicas
        every = ((0, cfg.global_size),) if cfg.ramp is None else cfg.ramp.thresholds(cfg.global_size, sequence_length)
        # Thresholds in tokens may round to the same row: the later size is used.
        self.thresholds = tuple(dict(every).items())
        """(rows read before the size starts, rows of a step before `decrease`), in order."""

    def nominal(self, consumed: int) -> int:
        """Configured rows of the step after `consumed` rows, before they are checked against the devices."""
        return next(rows for first, rows in reversed(self.thresholds) if first <= consumed)

    def at(self, consumed: int) -> BatchSize:
        """Size of the step that starts after `consumed` rows of the run.

        Raises UserError if it is not divisible by the devices, and batch.decrease is off or rounds it to 0.
        """
        return self._size(self.nominal(consumed))

    def sizes(self) -> tuple[BatchSize, ...]:
        """All batch sizes of the run, in order: one compiled step each."""
        return tuple(dict.fromkeys(self._size(rows) for _, rows in self.thresholds))

    def samples(self, steps: int, start: int = 0) -> int:
        """Rows read by `steps` steps that start after `start` rows."""
        consumed = start
        for rows, until in self._sizes_from(start):
            # A step may read more rows than a whole size of the ramp has.
            count = steps if until is None else min(steps, max(-(-(until - consumed) // rows), 0))
            consumed, steps = consumed + count * rows, steps - count
            if not steps:
                break
        return consumed - start

    def steps(self, samples: int, start: int = 0) -> int:
        """Fewest steps that read at least `samples` rows, starting after `start` rows."""
        consumed, steps = start, 0
        for rows, until in self._sizes_from(start):
            end = start + samples if until is None else min(start + samples, until)
            count = max(-(-(end - consumed) // rows), 0)
            consumed, steps = consumed + count * rows, steps + count
            if consumed >= start + samples:
                break
        return steps

    def _sizes_from(self, start: int) -> list[tuple[int, int | None]]:
        """(rows of a step, rows read when the next size starts) from `start` on; None for the last size."""
        starts = [first for first, _ in self.thresholds[1:]]
        return [
            (self._size(rows).rows, until)
            for (_, rows), until in zip(self.thresholds, [*starts, None], strict=True)
            if until is None or until > start
        ]

    def _size(self, rows: int) -> BatchSize:
        used = rows // self.unit * self.unit if self.cfg.decrease else rows
        if used % self.unit or not used:
            raise UserError(
                f"a step of {rows} rows is not divisible by batch.micro_size={self.cfg.micro_size} x "
                f"{self.unit // self.cfg.micro_size} data-parallel devices = {self.unit}: use a multiple, or "
                "batch.decrease=true for the next lower one"
            )
        return BatchSize(used, used // self.unit)
