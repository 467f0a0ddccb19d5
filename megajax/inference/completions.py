"""Complete answers of an engine that runs on the caller's thread."""

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
    """Yield the answers to prompts in order, as soon as they and all earlier ones are complete.

    requests: prompts and their settings, consumed as the engine has capacity. show: called with each piece;
    interrupted: called before each step, True ends all answers at once. Raises Refused.
    """
    waiting, running, number, more = iter(requests), deque[tuple[str, list[Answer]]](), 0, True

    def deliver(answers: list[Answer], piece: Piece) -> None:
        answers[piece.choice].add(piece)
        show(piece)

    while more or running:
        while more and engine.requests < engine.capacity:
            following = next(waiting, None)
            more = following is not None
            if following is not None:
                prompt, sampling = following
                name, answers = f"complete {number}", [Answer() for _ in range(sampling.n)]
                collect = partial(deliver, answers)
                engine.submit(Request(identifier=name, prompt=prompt, sampling=sampling, deliver=collect))
                running.append((name, answers))
                number += 1
        if interrupted():
            for name, _ in running:
                engine.cancel(name)
        engine.step()
        while running and all(answer.finish for answer in running[0][1]):
            yield running.popleft()[1]
