"""Finds the settings of speculative decoding: the same prompts, plainly and with each candidate. For the `tune` stage.

The temperature of a draft is data of a launch, so that all candidates share one engine. They are compared by tokens a round,
which chance and other work of the machine move less than seconds. How many tokens to draft follows from the best candidate: place
by place it is known how many drafts were accepted, and launches of two lengths were timed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmjax.errors import ConfigError, RequestError
from llmjax.pipeline.batch_input import BatchInput
from llmjax.server.protocol import ApiRequest

if TYPE_CHECKING:
    from llmjax.engine.config import SpeculationConfig
    from llmjax.engine.engine import Engine
    from llmjax.pipeline.stages import StageContext
    from llmjax.pipeline.stages.tune import TuneSection


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one candidate gave.

    Attributes:
        tokens: sampled. seconds: for all of them, prompts included.
        rounds, drafted, accepted: as `SpeculationOutput` has them; 0 for plain decoding.
        accepted_at: rounds in which the first, second, ... draft was accepted.
    """

    tokens: int
    seconds: float
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: Sequence[int] = ()

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def round_tokens(self) -> float:
        """Tokens of a round, on average: those accepted, and one."""
        return 1 + self.accepted / self.rounds if self.rounds else 1.0


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What `run_tune` found.

    Attributes:
        plain: without drafts. candidates: by temperature.
        lengths: expected of each number of drafts at the best temperature: tokens a round, times the speed of plain steps.
        config: what the engine was built for.
    """

    plain: Measured
    candidates: Mapping[float, Measured]
    lengths: Mapping[int, tuple[float, float]]
    config: SpeculationConfig

    @property
    def temperature(self) -> float:
        """The best; of equal ones the one nearest to the request's own."""
        return max(self.candidates, key=lambda one: (round(self.candidates[one].round_tokens, 3), -abs(one - 1)))

    @property
    def tokens(self) -> int:
        """The best number of drafts."""
        return max(self.lengths, key=lambda one: self.lengths[one][1])

    def yaml(self) -> str:
        """The line to write into the engine's stage, beside the keys of the section that stay."""
        if self.lengths[self.tokens][1] <= 1:
            return "speculative: {method: off}"
        warm = f", temperature: {self.temperature:g}" if len(self.candidates) > 1 else ""
        return f"speculative: {{tokens: {self.tokens}{warm}}}"

    def summary(self) -> Mapping[str, Any]:
        """For people."""
        plain = {"temperature": "no drafts", "accepted": "", "tokens a round": "", "tokens/s": f"{self.plain.rate:.1f}", "": ""}
        tried = [
            {
                "temperature": f"{temperature:g}",
                "accepted": f"{100 * one.accepted / one.drafted:.0f} %" if one.drafted else "nothing drafted",
                "tokens a round": f"{one.round_tokens:.2f}",
                "tokens/s": f"{one.rate:.1f}",
                "": "best" if temperature == self.temperature else "",
            }
            for temperature, one in self.candidates.items()
        ]
        lengths = [
            {
                "tokens": length,
                "tokens a round": f"{tokens:.2f}",
                "expected speed-up": f"{gain:.2f}",
                "": "best" if length == self.tokens else "",
            }
            for length, (tokens, gain) in self.lengths.items()
        ]
        return {"tried": [plain, *tried], "expected": lengths, "write": self.yaml()}


def run_tune(context: StageContext[TuneSection]) -> Tuning:
    """Measures every candidate. Raises `ConfigError` where there is nothing to measure, `StoreError` for an unreadable file."""
    section, engine = context.config, context.inputs["engine"].engine
    built: SpeculationConfig | None = engine.config.speculative
    if built is None:
        raise ConfigError("the engine has no speculative decoding to tune: set its speculative.method")
    if engine.config.deterministic:
        raise ConfigError("a deterministic engine drafts always `tokens`, and has no other launches to compare: tune without it")
    requests = read_prompts(section)
    temperatures = list(dict.fromkeys(section.temperatures))
    if built.method == "ngram" or all(request.params.temperature == 0 for request in requests):
        why = "n-grams have no temperature" if built.method == "ngram" else "every request is greedy, and so is its draft"
        context.reporter.message("info", f"one temperature only: {why}")
        temperatures = [1.0]
    total, done = (len(temperatures) + 1) * len(requests), 0

    def measure(config: SpeculationConfig | None) -> Measured:
        nonlocal done
        engine.set_policy(speculative=config)
        found = answer(engine, requests, rows=min(engine.config.max_sequences, built.disable_above_batch))
        done += len(requests)
        context.reporter.progress(context.name, done, total)
        return found

    try:
        plain = measure(None)
        tried = {one: measure(dataclasses.replace(built, temperature=one, adaptive=False)) for one in temperatures}
        rows = min(len(requests), engine.config.max_sequences, built.disable_above_batch)
        costs = {length: engine.speculation.launch_seconds.of(rows, length) for length in (0, *built.lengths)}
    finally:
        engine.set_policy(speculative=built)
    found = Tuning(plain, tried, {}, built)
    return dataclasses.replace(found, lengths=expected_lengths(tried[found.temperature], costs))


def read_prompts(section: TuneSection) -> list[ApiRequest]:
    """The first requests of the file, each with a seed, so that all candidates have the same luck."""
    source = BatchInput(Path(section.prompts))
    requests: list[ApiRequest] = []
    problem = "it is empty"
    try:
        for line in source.lines({"max_tokens": section.output_tokens} | section.defaults.as_mapping()):
            if line.request is None:
                problem = f"line {line.number}: {line.error}"
                continue
            params = line.request.params
            wanted = section.output_tokens if params.max_tokens is None else min(params.max_tokens, section.output_tokens)
            seed = len(requests) if params.seed is None else params.seed
            params = dataclasses.replace(params, max_tokens=wanted, seed=seed)
            requests.append(dataclasses.replace(line.request, params=params))
            if len(requests) == section.limit:
                break
    finally:
        source.close()
    if not requests:
        raise ConfigError(f"{section.prompts} has no prompt that can be asked ({problem})")
    return requests


def answer(engine: Engine, requests: Sequence[ApiRequest], *, rows: int) -> Measured:
    """Answers all, at most `rows` at a time: with more nobody would draft. Raises `RequestError` for one that cannot be asked."""
    before = [] if engine.speculation is None else engine.speculation.counts.accepted_at()
    started, waiting, live = time.perf_counter(), list(requests), set[str]()
    tokens = rounds = drafted = accepted = 0
    try:
        while waiting or live:
            while waiting and len(live) < rows:
                live.update(_add(engine, waiting.pop(0)))
            for output in engine.step(closed=True):
                if output.finished and output.request_id in live:
                    live.remove(output.request_id)
                    tokens += sum(len(choice.token_ids) for choice in output.outputs)
                    if output.speculation is not None:
                        rounds += output.speculation.rounds
                        drafted += output.speculation.drafted
                        accepted += output.speculation.accepted
    finally:
        for request_id in live:
            engine.abort(request_id)
    seconds = time.perf_counter() - started
    after = [] if engine.speculation is None else engine.speculation.counts.accepted_at()
    accepted_at = [now - then for now, then in zip(after, before, strict=True)]
    return Measured(tokens, seconds, rounds, drafted, accepted, accepted_at)


def _add(engine: Engine, request: ApiRequest) -> list[str]:
    try:
        if request.endpoint == "chat":
            return [engine.add_chat(list(request.messages), request.params, **request.template_options)]
        special = request.add_special_tokens
        return [engine.add_request(prompt, request.params, add_special_tokens=special) for prompt in request.prompts]
    except RequestError as error:
        raise ConfigError(f"a prompt cannot be asked: {error}") from None


def expected_lengths(best: Measured, costs: Mapping[int, float]) -> dict[int, tuple[float, float]]:
    """What rounds of 1, 2, ... drafts are expected to give: tokens, and times the tokens a second of plain steps.

    Args:
        best: measured with rounds of as many drafts as `best.accepted_at` has places.
        costs: seconds of launches by number of drafts, 0 for a plain step; of lengths between them on a straight line.
    """
    lengths = sorted(length for length in costs if length)
    first, last = lengths[0], lengths[-1]
    slope = (costs[last] - costs[first]) / (last - first) if last > first else max(0.0, costs[first] - costs[0]) / first
    found = {}
    for length in range(1, len(best.accepted_at) + 1):
        tokens = 1 + sum(best.accepted_at[:length]) / max(1, best.rounds)
        seconds = max(costs[first] + slope * (length - first), costs[0])
        found[length] = (tokens, tokens * costs[0] / seconds)
    return found
