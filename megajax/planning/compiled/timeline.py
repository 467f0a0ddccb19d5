"""When the instructions of a compiled program run: kernels in program order, collectives one after another beside them.

There are two streams. Kernels run in the order of the program. A collective starts when the program has come to its
start and the one before it has arrived; its end waits until it has arrived. The wait is exposed, and counts for the
collectives that are on the link in that time: a small one often waits behind a large one. Of a loop, the first two
iterations are followed; the others are like the second. Of a conditional, each branch is followed, and its times count
as often as it is taken.
"""

from collections.abc import Mapping
from typing import NamedTuple

from megajax.planning.compiled import hlo
from megajax.planning.compiled.audit import FREE
from megajax.planning.compiled.instruction_times import InstructionTimes


class Timeline(NamedTuple):
    """Seconds of one step and device."""

    seconds: float
    computing: float
    """Of kernels; the rest is exposed."""
    exposed: Mapping[str, float]
    """Name of the instruction of a collective -> seconds in which nothing runs but it, all its runs together."""

    @property
    def exposed_seconds(self) -> float:
        return self.seconds - self.computing


def timeline(costs: InstructionTimes, unknown_trips: int = 1) -> Timeline:
    """The timeline of a program. unknown_trips: see `hlo.rounds`."""
    streams = _Streams(costs, unknown_trips)
    streams.run(costs.program.entry, 1.0, 0)
    return Timeline(streams.kernels, streams.kernels - sum(streams.exposed.values()), streams.exposed)


class _Streams:
    """The times at which both streams are free."""

    def __init__(self, costs: InstructionTimes, unknown_trips: int):
        self.costs, self.unknown_trips = costs, unknown_trips
        self.kernels = self.links = 0.0
        self.exposed: dict[str, float] = {}
        self.sent: list[tuple[str, float, float]] = []
        """Collectives in the order of their starts, with the times at which they go out and arrive."""

    def run(self, name: str, times: float, depth: int) -> None:
        """Runs a computation once. times: how often it counts; depth: number of loops around it."""
        program, home = self.costs.program, self.costs.program.computations[name]
        arrivals: dict[str, float] = {}
        origins: dict[str, str] = {}
        for op in home.values():
            if op.opcode == "while":
                self._loop(op, times, depth)
            elif op.opcode == "conditional":
                self._conditional(op, times, depth)
            elif op.opcode == "call":
                for callee in program.callees_of(op):
                    self.run(callee, times, depth)
            elif op.opcode == "async-update":
                origins[op.name] = origins.get(op.operands[0], op.operands[0])
            elif op.opcode.endswith(hlo.FINISH):
                origin = origins.get(op.operands[0], op.operands[0])
                self._wait(origin, arrivals.get(origin, 0.0), times)
            elif op.opcode in FREE:
                continue
            elif (seconds := self.costs.collective(op, home)) is not None:
                begin = max(self.kernels, self.links)
                arrivals[op.name] = self.links = begin + seconds
                self.sent.append((op.name, begin, self.links))
                if not op.asynchronous:
                    self._wait(op.name, self.links, times)
            else:
                self.kernels += self.costs.kernel(op, home)

    def _wait(self, name: str, arrival: float, times: float) -> None:
        """Waits for a collective that arrives then, and so for those that are on the link before it."""
        left = arrival
        for sent, begin, end in reversed(self.sent):
            if min(left, end) <= self.kernels:
                break
            since = max(begin, self.kernels)
            self._expose(sent, times * (min(left, end) - since))
            left = min(left, since)
        self._expose(name, times * (left - self.kernels))  # Branches have clocks of their own.
        self.kernels = max(self.kernels, arrival)

    def _expose(self, name: str, seconds: float) -> None:
        if seconds > 0:
            self.exposed[name] = self.exposed.get(name, 0.0) + seconds

    def _loop(self, op: hlo.Instruction, times: float, depth: int) -> None:
        (body, *_), begin = op.callees["body"], (self.kernels, self.links)
        trips = self.costs.trips(op, depth, self.unknown_trips)
        self.run(body, min(trips, 1) * times, depth + 1)
        self._move(begin, min(trips, 1))
        if trips > 1:
            begin = self.kernels, self.links
            self.run(body, (trips - 1) * times, depth + 1)
            self._move(begin, trips - 1)

    def _move(self, begin: tuple[float, float], times: float) -> None:
        """Repeats what has run since `begin`: `times` times in all."""
        self.kernels = begin[0] + times * (self.kernels - begin[0])
        self.links = begin[1] + times * (self.links - begin[1])

    def _conditional(self, op: hlo.Instruction, times: float, depth: int) -> None:
        begin, kernels, links = (self.kernels, self.links), 0.0, 0.0
        for name, share in self.costs.branches(op):
            self.kernels, self.links = begin
            self.run(name, share * times, depth)
            kernels, links = kernels + share * self.kernels, links + share * self.links
        self.kernels, self.links = kernels, links
