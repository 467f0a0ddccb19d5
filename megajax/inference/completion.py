"""Answers to many prompts by an engine on the caller's thread."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from megajax.inference.engine import Engine
from megajax.inference.request import Output, PromptImage, Request
from megajax.inference.sampling_settings import Sampling


def complete(
    engine: Engine,
    requests: Iterable[tuple[tuple[int, ...], Sampling]],
    show: Callable[[Output], None] = lambda output: None,
    interrupted: Callable[[], bool] = lambda: False,
    images: tuple[PromptImage, ...] = (),
    *,
    experts: bool = False,
) -> Iterator[list[Output]]:
    """Yield the answers to prompts in order, as soon as they and all earlier ones are complete.

    The engine runs on the caller's thread. requests: prompts and their settings, consumed as the engine has capacity.
    show: called with each output; interrupted: called before each step, True ends all answers at once; images: of each
    prompt; experts: see `Request`. Raises Refused.
    """
    waiting, running, number, more = iter(requests), deque[tuple[str, list[Output]]](), 0, True

    def deliver(answers: list[Output], output: Output) -> None:
        answers[output.choice] = answers[output.choice].merge(output)
        show(output)

    while more or running:
        while more and engine.requests < engine.capacity:
            following = next(waiting, None)
            more = following is not None
            if following is not None:
                prompt, sampling = following
                name, answers = f"complete {number}", [Output(choice) for choice in range(sampling.n)]
                collect = partial(deliver, answers)
                inputs: Any = {"prompt": prompt, "sampling": sampling, "images": images, "experts": experts}
                engine.submit(Request(identifier=name, deliver=collect, **inputs))
                running.append((name, answers))
                number += 1
        if interrupted():
            for name, _ in running:
                engine.cancel(name)
        engine.step()
        while running and all(answer.finish for answer in running[0][1]):
            yield running.popleft()[1]
