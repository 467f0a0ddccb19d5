"""Complete answers from an engine that runs on the caller's thread."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from megajax.inference.engine import Engine
from megajax.inference.request import Answer, Piece, Request, Sampling


def complete(
    engine: Engine,
    requests: Iterable[tuple[tuple[int, ...], Sampling]],
    show: Callable[[Piece], None] = lambda piece: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> Iterator[list[Answer]]:
    """The answers to prompts, in their order, each when it is complete and those before it are.

    requests: prompts and their settings, taken as the engine has room. show: called with each piece; interrupted: asked
    before each step, True ends the answers where they are. Raises Refused.
    """
    waiting, running, number, more = iter(requests), deque[tuple[str, list[Answer]]](), 0, True

    def deliver(answers: list[Answer], piece: Piece) -> None:
        answers[piece.choice].add(piece)
        show(piece)

    while more or running:
        while more and engine.requests < engine.capacity:
            asked = next(waiting, None)
            more = asked is not None
            if asked is not None:
                prompt, sampling = asked
                name, answers = f"complete {number}", [Answer() for _ in range(sampling.n)]
                own = partial(deliver, answers)
                engine.submit(Request(identifier=name, prompt=prompt, sampling=sampling, deliver=own))
                running.append((name, answers))
                number += 1
        if interrupted():
            for name, _ in running:
                engine.cancel(name)
        engine.step()
        while running and all(answer.finish for answer in running[0][1]):
            yield running.popleft()[1]
