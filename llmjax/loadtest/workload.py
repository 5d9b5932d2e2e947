"""What is asked: synthetic requests with lengths from a seed, or those of a traffic file. Sends nothing, knows no time."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmjax.errors import ConfigError, StoreError
from llmjax.loadtest.target import TrafficRequest

if TYPE_CHECKING:
    from llmjax.engine.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Token counts: log-normal around `median`, rounded and then clipped. `sigma` is that of the logarithm; 0: all alike."""

    median: float
    sigma: float = 0.0
    min: int = 1
    max: int | None = None

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        """`count` lengths."""
        drawn = np.round(random.lognormal(math.log(self.median), self.sigma, count))
        lengths: list[int] = np.clip(drawn, self.min, self.max).astype(int).tolist()
        return lengths


@dataclasses.dataclass(frozen=True)
class SharedPrefixes:
    """A `share` of the requests begins with one of `groups` texts of `tokens` tokens, before tokens of its own."""

    tokens: int
    share: float
    groups: int = 1


@dataclasses.dataclass(frozen=True)
class Synthetic:
    """Random token ids. `max_tokens` is what every request asks for (or its own length, when that is more); None: its own
    length, known ahead."""

    prompts: Lengths
    outputs: Lengths
    shared: SharedPrefixes | None = None
    max_tokens: int | None = None
    seed: int = 0

    def requests(self, count: int, num_tokens: int, *, variant: int = 0) -> list[TrafficRequest]:
        """`count` requests over a vocabulary of `num_tokens`.

        Lengths and sharing depend on the seed alone; the ids on `variant` too, so that a later run of the same traffic finds
        nothing of an earlier one in a prefix cache. Prompt lengths are drawn first, then output lengths.
        """
        random = np.random.default_rng(self.seed)
        prompts, outputs = self.prompts.draw(random, count), self.outputs.draw(random, count)
        sharing = random.random(count)
        groups = random.integers(0, self.shared.groups if self.shared is not None else 1, count).tolist()
        contents = np.random.default_rng((self.seed, variant))
        prefixes: list[list[int]] = []
        if self.shared is not None:
            prefixes = contents.integers(0, num_tokens, (self.shared.groups, self.shared.tokens)).tolist()
        made = []
        for length, output, chance, group in zip(prompts, outputs, sharing, groups, strict=True):
            ids: list[int] = contents.integers(0, num_tokens, length).tolist()
            if self.shared is not None and chance < self.shared.share:
                ids = prefixes[group] + ids
            made.append(TrafficRequest(ids, output, max(output, self.max_tokens or 0)))
        return made


def as_texts(requests: Sequence[TrafficRequest], tokenizer: Tokenizer) -> list[TrafficRequest]:
    """The same with prompts of token ids as texts, whose tokens need not be exactly as many."""
    made = []
    for request in requests:
        ids = [token for token in request.prompt if isinstance(token, int)]
        text = tokenizer.decode(ids, skip_special_tokens=True) or " "
        made.append(dataclasses.replace(request, prompt=text))
    return made


def check_fits(requests: list[TrafficRequest], max_context: int) -> None:
    """Raises `ConfigError` when a request of known length needs more than the engine's context."""
    needed = [len(r.prompt) + r.output_tokens for r in requests if not isinstance(r.prompt, str) and _is_ids(r.prompt)]
    if needed and max(needed) > max_context:
        raise ConfigError(
            f"the workload's longest request needs {max(needed)} tokens and the engine's max_context is {max_context}: "
            "raise max_context, or lower the largest prompts (prompts.tokens.max) or outputs (output_tokens.max)"
        )


def read_traffic(path: Path, *, output_tokens: int, limit: int | None, max_tokens: int | None = None) -> list[TrafficRequest]:
    """Requests of a JSONL file, the first `limit`.

    A line is a text, or an object with `prompt` (text or token ids) or `messages`, and if it likes `output_tokens` (or
    `max_tokens`; default `output_tokens`) and `arrival`, seconds since any moment; or one of a server's traffic log, of which
    the first choice of each prompt counts. Raises `StoreError` with file and line.
    """
    requests: list[TrafficRequest] = []
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if limit is not None and len(requests) >= limit:
                    break
                if line.strip() and (request := _traffic_line(line, f"{path}:{number}", output_tokens, max_tokens)):
                    requests.append(request)
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"the traffic file {path} cannot be read: {error}") from None
    if not requests:
        raise StoreError(f"the traffic file {path} is empty: write one request a line")
    timed = sum(request.arrival is not None for request in requests)
    if timed not in (0, len(requests)):
        raise StoreError(f"the traffic file {path} has an 'arrival' in {timed} of {len(requests)} lines: give all or none")
    if timed:
        requests.sort(key=lambda request: request.arrival or 0.0)
        first = requests[0].arrival or 0.0
        requests = [dataclasses.replace(request, arrival=(request.arrival or 0.0) - first) for request in requests]
    return requests


_KEYS = {"prompt", "messages", "output_tokens", "max_tokens", "arrival"}
_LOGGED = {"time", "choice", "output", "sampling"}  # what tells a line of a server's traffic log


def _of_a_log(line: dict[str, Any]) -> dict[str, Any] | None:
    """A line of a server's traffic log as one of a traffic file; None for a further choice of the same prompt."""
    if line.get("choice") != 0:
        return None
    names = {"prompt_ids": "prompt", "prompt": "prompt", "messages": "messages"}
    fields = {names[name]: line[name] for name in names if name in line}
    sampling = line.get("sampling")
    most = sampling.get("max_tokens") if isinstance(sampling, dict) else None
    asked = line.get("output_tokens") or 1  # a prompt that was only scored
    return {**fields, "output_tokens": asked, "max_tokens": most or asked, "arrival": line.get("time")}


def _traffic_line(line: str, at: str, default: int, max_tokens: int | None) -> TrafficRequest | None:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise StoreError(f"{at}: no JSON: {error}") from None
    fields: Any = {"prompt": value} if isinstance(value, str | list) else value
    if isinstance(fields, dict) and fields.keys() >= _LOGGED:
        fields = _of_a_log(fields)
        if fields is None:
            return None
    if not isinstance(fields, dict) or ("prompt" in fields) == ("messages" in fields):
        raise StoreError(f"{at}: expected a text, or an object with either 'prompt' or 'messages'")
    if unknown := sorted(set(fields) - _KEYS):
        raise StoreError(f"{at}: unknown key '{unknown[0]}'; known: {', '.join(sorted(_KEYS))}")
    prompt = fields["prompt"] if "prompt" in fields else fields["messages"]
    if "messages" in fields:
        good = isinstance(prompt, list) and bool(prompt) and all(isinstance(item, dict) for item in prompt)
    else:
        good = isinstance(prompt, str) or (isinstance(prompt, list) and _is_ids(prompt))
    if not good:
        raise StoreError(f"{at}: expected a text or a list of token ids as 'prompt', or a list of objects as 'messages'")
    arrival = fields.get("arrival")
    if arrival is not None and (isinstance(arrival, bool) or not isinstance(arrival, int | float) or not math.isfinite(arrival)):
        raise StoreError(f"{at}: expected seconds as 'arrival', got {arrival!r:.40}")
    asked = fields.get("output_tokens", fields.get("max_tokens"))
    tokens = default if asked is None else asked
    most = fields.get("max_tokens")
    for name, number in (("output_tokens", tokens), ("max_tokens", most)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise StoreError(f"{at}: expected a whole number of at least 1 as '{name}', got {number!r:.40}")
    return TrafficRequest(
        prompt, tokens, max(tokens, most or max_tokens or 0), arrival=None if arrival is None else float(arrival)
    )


def _is_ids(prompt: Any) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) for item in prompt)
