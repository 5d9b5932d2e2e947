"""Models whose answers are written down: scorers of given distributions, generators of given outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from llmjax.quantization.scores import Generation, Prompt, Scores


class TableScorer:
    """Logits [T - 1, V] of each text, made by a function of its ids."""

    def __init__(self, logits: Callable[[Sequence[int]], np.ndarray]) -> None:
        self.logits = logits

    def score(self, tokens: Sequence[int], block: int) -> Iterator[Scores]:
        rows = self.logits(tokens)
        for start in range(0, len(tokens) - 1, block):
            part = rows[start : start + block]
            yield Scores.of_logits(part, tokens[start + 1 : start + 1 + len(part)])


class BestTokens:
    """Another scorer's best `count` tokens, as an engine tells them."""

    def __init__(self, scorer: TableScorer, count: int) -> None:
        self.scorer, self.count = scorer, count

    def score(self, tokens: Sequence[int], block: int) -> Iterator[Scores]:
        for whole in self.scorer.score(tokens, block):
            ids = np.argsort(-whole.logprobs, axis=-1, kind="stable")[:, : self.count]
            yield Scores(whole.chosen, np.take_along_axis(whole.logprobs, ids, -1), ids)


class ScriptedGenerator:
    """Outputs by a function of the prompt's text."""

    def __init__(self, output: Callable[[Prompt], Generation]) -> None:
        self.output = output

    def greedy(self, prompts: Sequence[Prompt], max_tokens: int) -> list[Generation]:
        return [self.output(prompt) for prompt in prompts]
