"""`EngineModel`: an `LLM`, or anything with its `generate` and `chat`, as a `Scorer` and a `Generator`. Host only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from llmjax.quantization.scores import Generation, Prompt, Scores
from llmjax.sampling_params import MAX_LOGPROBS, SamplingParams


class _Engine(Protocol):
    """What is used of `llmjax.engine.llm.LLM`."""

    def generate(self, prompts: Any, params: Any = None) -> list[Any]: ...
    def chat(self, conversations: Any, params: Any = None) -> list[Any]: ...


class EngineModel:
    """Scores with the engine's prompt logprobs: the best 20 tokens of each position, so that KL is a lower bound.

    The engine runs what a server would run (its kernels, its int8 paths, its cache), which a bare forward does not. It must be
    idle; texts must fit its context.
    """

    def __init__(self, llm: _Engine) -> None:
        self.llm = llm

    def score(self, tokens: Sequence[int], block: int) -> Iterator[Scores]:
        """See `Scorer`. Raises `RequestError` for a text that the engine cannot take."""
        params = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=MAX_LOGPROBS)
        (output,) = self.llm.generate([list(tokens)], params)
        found = (output.prompt_logprobs or [])[1:]
        if output.outputs[0].finish_reason == "error" or len(found) < len(tokens) - 1:
            yield from _broken(len(tokens) - 1, block)
            return
        for start in range(0, len(found), block):
            part = found[start : start + block]
            chosen = np.array([one.chosen.logprob for one in part], np.float64)
            ids = np.array([[top.token_id for top in one.top] for one in part], np.int64)
            yield Scores(chosen, np.array([[top.logprob for top in one.top] for one in part], np.float64), ids)

    def greedy(self, prompts: Sequence[Prompt], max_tokens: int) -> list[Generation]:
        """See `Generator`. Raises `RequestError` for the first prompt that cannot be served."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        talks = [index for index, prompt in enumerate(prompts) if _is_talk(prompt)]
        plain = [index for index in range(len(prompts)) if index not in set(talks)]
        outputs: dict[int, Any] = {}
        for places, ask in ((plain, self.llm.generate), (talks, self.llm.chat)):
            if places:
                outputs |= dict(zip(places, ask([prompts[index] for index in places], params), strict=True))
        return [_generation(outputs[index].outputs[0]) for index in range(len(prompts))]


def _is_talk(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and not isinstance(prompt[0], int)


def _generation(output: Any) -> Generation:
    return Generation(tuple(output.token_ids), output.text, output.error if output.finish_reason == "error" else None)


def _broken(positions: int, block: int) -> Iterator[Scores]:
    """NaN for every position: the engine ends such a request as a whole, and does not tell where it met NaN."""
    for start in range(0, positions, block):
        rows = min(block, positions - start)
        nothing = np.full((rows, MAX_LOGPROBS), np.nan)
        yield Scores(np.full(rows, np.nan), nothing, np.zeros((rows, MAX_LOGPROBS), np.int64))
