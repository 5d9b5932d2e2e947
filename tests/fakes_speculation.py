"""Texts that are drafted for with a known probability, and an engine in virtual time that asks `Speculation` what to launch.

Like the real one it is a launch ahead of the results it has read, and promises a row as many tokens as it may give.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping

from fakes_scheduling import make_request

from llmjax.scheduling.request import Request
from llmjax.scheduling.speculation import Drafting, LaunchSeconds, Speculation
from llmjax.scheduling.speculation_config import SpeculationConfig

BUCKETS = (1, 8, 16, 32, 64)
PLAIN_SECONDS = 0.005
Cost = Callable[[int, int], float]  # row bucket and draft length (0: plain) -> seconds


def costs(relative: Mapping[int, float]) -> Cost:
    """Rounds that take so many plain steps, by draft length, whatever the bucket."""
    return lambda rows, length: PLAIN_SECONDS * (relative[length] if length else 1.0)


USUAL = costs({1: 1.25, 2: 1.45, 3: 1.65, 4: 1.85, 5: 2.05, 8: 2.7})
"""A draft of a fifth of the model and a verification a little dearer than a step."""


def launch_seconds(cost: Cost, config: SpeculationConfig) -> LaunchSeconds:
    return LaunchSeconds(
        {rows: cost(rows, 0) for rows in BUCKETS},
        {(rows, length): cost(rows, length) for rows in BUCKETS if rows <= 32 for length in config.lengths},
    )


def control(cost: Cost = USUAL, *, deterministic: bool = False, **options: object) -> Speculation:
    config = SpeculationConfig(**{"method": "draft", **options})  # type: ignore[arg-type]
    return Speculation(config, launch_seconds(cost, config), deterministic=deterministic)


@dataclasses.dataclass(eq=False)
class Text:
    """An output of `tokens`, whose drafts are accepted with probability `acceptance` (of the number of tokens so far)."""

    acceptance: float | Callable[[int], float]
    tokens: int = 400
    prompt: int = 5
    prompt_class: str = "prose"
    structured: bool = False

    def at(self, num_output: int) -> float:
        return self.acceptance(num_output) if callable(self.acceptance) else self.acceptance


@dataclasses.dataclass
class Run:
    """What came of it. Seconds and tokens are those while texts still waited, so that the last ones' length does not count."""

    requests: list[Request]
    seconds: float = 0.0
    tokens: int = 0
    launches: list[Drafting | None] = dataclasses.field(default_factory=list)
    rows: list[int] = dataclasses.field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def run(
    speculation: Speculation | None,
    texts: Iterable[Text],
    *,
    batch: int = 16,
    cost: Cost = USUAL,
    seed: int = 0,
    noise: float = 0.0,
) -> Run:
    """All texts, `batch` at a time. `noise` is the standard deviation of a launch's seconds, relative."""
    texts = list(texts)
    whole = len(texts) <= batch
    dice = random.Random(seed)
    waiting = [(text, _request(index, text)) for index, text in enumerate(texts)]
    result = Run([request for _, request in waiting])
    running: list[tuple[Text, Request]] = []
    unread: list[tuple[Text, Request, int, int, int]] = []  # of the launch in flight: promised, drafts, accepted
    took: tuple[str, int, int, float] | None = None
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(waiting.pop(0))
        decoding = [(text, request) for text, request in running if request.num_left > 0]
        launched: list[tuple[Text, Request, int, int, int]] = []
        launch: tuple[str, int, int, float] | None = None
        if decoding:
            drafting = speculation.plan([request for _, request in decoding]) if speculation is not None else None
            drafts = drafting.drafts if drafting is not None else [0] * len(decoding)
            length = drafting.length if drafting is not None else 0
            for (text, request), most in zip(decoding, drafts, strict=True):
                assert 0 <= most <= min(length, request.num_left - 1)
                promised = min(most + 1, request.num_left)
                accepted = 0
                while accepted < most and dice.random() < text.at(len(request.output_ids)):
                    accepted += 1
                request.num_left -= promised
                request.num_in_flight += promised
                request.num_computed_tokens += promised
                launched.append((text, request, promised, most, accepted))
            bucket = next(size for size in BUCKETS if size >= len(decoding))
            seconds = cost(bucket, length) * max(0.5, dice.gauss(1.0, noise))
            if waiting or whole:
                result.seconds += seconds
            result.launches.append(drafting)
            result.rows.append(len(decoding))
            launch = ("decode", bucket, 1, seconds) if drafting is None else ("speculate", bucket, length, seconds)
        for _, request, promised, most, accepted in unread:
            given = accepted + 1
            request.num_in_flight -= promised
            request.num_computed_tokens -= promised - given
            request.num_left += promised - given
            request.output_ids += [1] * given
            if waiting or whole:
                result.tokens += given
            if speculation is not None and most:
                speculation.observe(request, most, accepted)
            if len(request.output_ids) == request.limit:
                running = [pair for pair in running if pair[1] is not request]
                if speculation is not None:
                    speculation.ended(request)
        if speculation is not None and took is not None:
            speculation.measured(*took)
        unread, took = launched, launch
    return result


def _request(index: int, text: Text) -> Request:
    request = make_request(str(index), text.prompt, text.tokens)
    request.prompt_class, request.stepwise = text.prompt_class, text.structured
    request.num_left = text.tokens
    request.num_computed_tokens = text.prompt
    return request
