"""Drafts for speculative decoding: tokens that may follow a sequence, for one step of the device to verify.

A text repeats itself: names, code, quotations of the prompt. The draft is what followed the last tokens where they
occurred before (prompt lookup).
"""

from array import array

SHORTEST, LONGEST = 2, 4
"""A match has at least SHORTEST tokens. Longer ones are preferred, up to LONGEST tokens."""
PLACES = 16
"""Earlier places that are compared, the latest first: a bound on the time of a draft."""


class EarlierText:
    """Drafts for one sequence. Memory and time for each new token are constant, so that 64 rows cost little."""

    def __init__(self, count: int):
        """count: tokens of a draft."""
        self._count = count
        self._latest: dict[int, int] = {}
        """Pair of tokens -> the latest position of its second token."""
        self._previous = array("i", [-1])
        """For each position, the previous one of the same pair; -1 if there is none."""

    def draft(self, tokens: list[int]) -> list[int]:
        """At most `count` tokens that may follow; none if the last tokens are new. tokens: may only grow at its end."""
        latest, previous = self._latest, self._previous
        for at in range(len(previous), len(tokens)):
            pair = tokens[at - 1] << 32 | tokens[at]
            previous.append(latest.get(pair, -1))
            latest[pair] = at
        place = self._match(tokens)
        if place < 0:
            return []
        following = tokens[place + 1 : place + 1 + self._count]
        # If the match is so recent that the text ends within the draft, it goes on repeating itself.
        return (following * self._count)[: self._count]

    def _match(self, tokens: list[int]) -> int:
        """The position of the end of the best match; -1 if there is none."""
        end, best, longest = len(tokens) - 1, -1, SHORTEST - 1
        place = self._previous[end]
        for _ in range(PLACES):
            if place < 0 or longest == LONGEST:
                break
            length = SHORTEST
            while length < LONGEST and length <= place and tokens[place - length] == tokens[end - length]:
                length += 1
            if length > longest:
                best, longest = place, length
            place = self._previous[place]
        return best
