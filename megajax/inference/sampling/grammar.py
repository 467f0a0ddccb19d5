"""Languages of bytes, and the automaton that reads them.

A grammar is a tree of byte sets, sequences, alternatives and repetitions, whose equal parts are shared. The automaton
is built while it is used: a state is a set of stacks of what is still to be matched, and the transitions of a state are
computed when a byte is first read in it. So deep nesting and large counts cost nothing until a text reaches them.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megajax.config.errors import UserError

DEAD, UNKNOWN = -1, -2
STATES, STACKS = 2**15, 4096
"""Most states of an automaton, and most ways to read on in one of them."""


@dataclass(frozen=True, eq=False, slots=True)
class Byte:
    """One byte of a set."""

    values: frozenset[int]


@dataclass(frozen=True, eq=False, slots=True)
class Joined:
    """The parts, one after the other."""

    parts: "tuple[Grammar, ...]"


@dataclass(frozen=True, eq=False, slots=True)
class Choice:
    """Any of the options."""

    options: "tuple[Grammar, ...]"


@dataclass(frozen=True, eq=False, slots=True)
class Repeat:
    """The part between `least` and `most` times; None: no upper bound."""

    part: "Grammar"
    least: int = 0
    most: int | None = None


type Grammar = Byte | Joined | Choice | Repeat


def one_of(values: bytes | Sequence[int]) -> Byte:
    """Any of these bytes."""
    return Byte(frozenset(values))


def literal(text: bytes) -> Grammar:
    """These bytes."""
    return Joined(tuple(one_of((value,)) for value in text))


def joined(*parts: Grammar) -> Grammar:
    """The parts, one after the other."""
    return Joined(parts)


def choice(*options: Grammar) -> Grammar:
    """Any of the options."""
    return options[0] if len(options) == 1 else Choice(options)


def optional(part: Grammar) -> Grammar:
    """The part or nothing."""
    return Repeat(part, 0, 1)


@dataclass(frozen=True, eq=False, slots=True)
class Stack:
    """What is still to be matched, the next part first. Equal stacks of an automaton are the same object."""

    part: Grammar
    rest: "Stack | None"


class Automaton:
    """A deterministic automaton of a grammar, with states numbered as they are reached; 0 is the first.

    Reading raises UserError for a grammar that needs more than STATES or STACKS, as counts within counts may.
    """

    def __init__(self, grammar: Grammar):
        self._stacks: dict[tuple[int, int], Stack] = {}
        self._counted: dict[tuple[int, int, int | None], Repeat] = {}
        self._numbers: dict[frozenset[Stack | None], int] = {}
        self._states: list[frozenset[Stack | None]] = []
        self._after: dict[frozenset[Stack | None], int] = {}
        self._table = np.full((64, 256), UNKNOWN, np.int32)
        self._number(self._expanded([self._push(grammar, None)]))

    @property
    def states(self) -> int:
        """Those that were reached so far."""
        return len(self._states)

    def accepts(self, state: int) -> bool:
        """Whether the text that led here is complete."""
        return None in self._states[state]

    def step(self, states: np.ndarray, values: np.ndarray) -> np.ndarray:
        """States int32 [n] after reading the bytes uint8 [n], DEAD where none is possible."""
        after = self._table[states, values]
        missing = np.unique(states[after == UNKNOWN].astype(np.int64) * 256 + values[after == UNKNOWN])
        if not len(missing):
            return after
        for pair in missing.tolist():
            target = self._next(*divmod(pair, 256))
            self._table[divmod(pair, 256)] = target
        return self._table[states, values]

    def read(self, state: int, text: bytes) -> int:
        """The state after reading the text, DEAD if it is impossible."""
        for value in text:
            if state == DEAD:
                return DEAD
            target = int(self._table[state, value])
            if target == UNKNOWN:
                target = self._table[state, value] = self._next(state, value)
            state = int(target)
        return state

    def _next(self, state: int, value: int) -> int:
        rests = frozenset(stack.rest for stack in self._states[state] if stack is not None and value in _values(stack))
        # Most bytes that a state can read lead to the same one.
        if rests not in self._after:
            self._after[rests] = self._number(self._expanded(rests)) if rests else DEAD
        return self._after[rests]

    def _number(self, stacks: frozenset[Stack | None]) -> int:
        number = self._numbers.setdefault(stacks, len(self._states))
        if number == STATES:
            del self._numbers[stacks]
            raise UserError(f"the text needs more than {STATES:,} states of its grammar: use fewer or smaller counts")
        if number == len(self._states):
            self._states.append(stacks)
            if number == len(self._table):
                self._table = np.concatenate([self._table, np.full_like(self._table, UNKNOWN)])
        return number

    def _push(self, part: Grammar, rest: Stack | None) -> Stack:
        key = id(part), id(rest)
        if key not in self._stacks:
            self._stacks[key] = Stack(part, rest)
        return self._stacks[key]

    def _expanded(self, stacks: Collection[Stack | None]) -> frozenset[Stack | None]:
        """The stacks with a byte on top, or nothing, that these can become without reading."""
        seen, todo = set(stacks), list(stacks)
        while todo:
            stack = todo.pop()
            for other in self._unfolded(stack) if stack is not None else ():
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
            if len(seen) > STACKS:
                raise UserError(f"the grammar has more than {STACKS:,} ways to read on: use fewer options or counts")
        return frozenset(stack for stack in seen if stack is None or isinstance(stack.part, Byte))

    def _unfolded(self, stack: Stack) -> Iterator[Stack | None]:
        part, rest = stack.part, stack.rest
        match part:
            case Joined():
                for each in reversed(part.parts):
                    rest = self._push(each, rest)
                yield rest
            case Choice():
                for option in part.options:
                    yield self._push(option, rest)
            case Repeat():
                if not part.least:
                    yield rest
                if part.most != 0:
                    yield self._push(part.part, self._push(self._fewer(part), rest))
            case Byte():
                pass

    def _fewer(self, part: Repeat) -> Repeat:
        """What is left of a repetition after one time."""
        if part.least == 0 and part.most is None:
            return part
        least, most = max(part.least - 1, 0), None if part.most is None else part.most - 1
        key = id(part.part), least, most
        if key not in self._counted:
            self._counted[key] = Repeat(part.part, least, most)
        return self._counted[key]


def _values(stack: Stack) -> frozenset[int]:
    return stack.part.values if isinstance(stack.part, Byte) else frozenset()
