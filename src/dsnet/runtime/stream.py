"""Bulk work through a plan: batches regrouped across each other, answers in the order of the images.

Images that take the same route wait for each other until there are enough of them for a batch that the route
runs well, or until the first of them has waited for so many batches. Fronts run as batches come in.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from dsnet.errors import DsnetError
from dsnet.models.gated import Decide
from dsnet.runtime.engine import Engine, Scored

__all__ = ["Answer", "stream"]


class Answer(NamedTuple):
    """Of one image: its place in the stream, logits [classes] and route; or what was wrong with it."""

    place: int
    logits: Tensor | None
    route: int | None
    error: str | None = None


@dataclass(slots=True)
class _Waiting:
    """Images that take the same route and have not run yet."""

    states: list[Scored] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    since: int = 0  # the batch that the first of them came with


def stream(
    engine: Engine, decide: Decide, batches: Iterable[Tensor | None], *, group: int = 16, delay: int = 8
) -> Iterator[Answer]:
    """Runs batches [B, C, H, W] one after the other and gives an answer for every image, in order.

    ``group`` images of a route run together; none waits for more than ``delay`` further batches. A batch that
    cannot be run (another shape, no numbers) is answered by its error and the rest go on; `None` stands for
    one image that could not be read.
    """
    if len(engine.gates) > 1:
        raise DsnetError(f"{engine.name} has several gates; streams are for networks with one")
    if type(group) is not int or type(delay) is not int or group < 1 or delay < 0:
        raise DsnetError(f"group must be an integer of at least 1, delay of at least 0, not {group}, {delay}")
    return _answers(engine, decide, iter(batches), group, delay)


def _answers(
    engine: Engine, decide: Decide, batches: Iterator[Tensor | None], group: int, delay: int
) -> Iterator[Answer]:
    done: dict[int, Answer] = {}
    waiting: dict[int, _Waiting] = {}
    following, came = 0, 0

    def run(choice: int) -> None:
        queue = waiting.pop(choice)
        state = queue.states[0] if len(queue.states) == 1 else Scored.join(queue.states)
        try:
            logits = engine.finish(state, (choice,))
        except DsnetError as error:
            done.update((place, Answer(place, None, None, str(error))) for place in queue.places)
            return
        for row, place in enumerate(queue.places):
            done[place] = Answer(place, logits[row], choice)

    def ready() -> Iterator[Answer]:
        nonlocal following
        while following in done:
            yield done.pop(following)
            following += 1

    failure: Exception | None = None
    for number in itertools.count():
        try:
            x = next(batches)
        except StopIteration:
            break
        except Exception as error:  # what came before it is answered first
            failure = error
            break
        try:
            if x is None:
                raise DsnetError("the image could not be read")
            state = engine.enter(x)
        except (DsnetError, RuntimeError, TypeError) as error:
            images = 1 if x is None or not isinstance(x, Tensor) or x.ndim != 4 else len(x)
            for place in range(came, came + images):
                done[place] = Answer(place, None, None, str(error))
            came += images
        else:
            positions = decide(engine.score(state), 0, None)
            for position, choice in enumerate(engine.gate(0).choices):
                rows = (positions == position).nonzero()[:, 0]
                if not len(rows):
                    continue
                queue = waiting.setdefault(choice, _Waiting(since=number))
                queue.states.append(state if len(rows) == len(positions) else state.take(rows))
                queue.places += [came + row for row in rows.tolist()]
            came += len(positions)
        for choice in [
            c for c, queue in waiting.items() if len(queue.places) >= group or number - queue.since >= delay
        ]:
            run(choice)
        yield from ready()
    for choice in list(waiting):
        run(choice)
    yield from ready()
    assert not done
    if failure is not None:
        raise failure
