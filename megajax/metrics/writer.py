"""What a writer of records and events is."""

from collections.abc import Iterable
from typing import Self

from megajax.config.errors import UserError
from megajax.display.text import say
from megajax.metrics.line_file import FileDeleted
from megajax.metrics.record import Record


class Writer:
    """Base class of writers: all methods do nothing."""

    def log(self, record: Record) -> None:
        """Write a training step or an evaluation."""

    def event(self, name: str, /, **fields: object) -> None:
        """Write an event, for example "start", "compiled" or "stopped". Pass `time` if it happened earlier."""

    def close(self) -> None:
        """Write buffered data. Called once, as the last method."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except UserError as failed:
            if error is None:
                raise
            # Keep the error that ended the run: on a full disk, it is probably the cause of this one too.
            if not isinstance(error, FileDeleted):
                say(str(failed))


class Writers(Writer):
    """Several writers as one; leaving its `with` block closes them all."""

    def __init__(self, writers: Iterable[Writer] = ()):
        self._writers = tuple(writers)

    def log(self, record: Record) -> None:
        for writer in self._writers:
            writer.log(record)

    def event(self, name: str, /, **fields: object) -> None:
        for writer in self._writers:
            writer.event(name, **fields)

    def close(self) -> None:
        """Close all writers, then raise the first error, if any."""
        errors: list[Exception] = []
        for writer in self._writers:
            try:
                writer.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
