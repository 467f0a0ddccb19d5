"""A started step of devices without a model."""

from collections.abc import Callable

from megajax.inference.request import Sampled


class StandInStep:
    """A started step, whose results are known when its tokens are chosen."""

    def __init__(self, chosen: Callable[[], list[list[Sampled]]]):
        self._chosen, self._results = chosen, None

    def choose(self) -> None:
        self._results = self._chosen()

    def results(self) -> list[list[Sampled]]:
        assert self._results is not None
        return self._results
