"""`measure_quality`: everything the gate wants to know of a candidate beside its baseline, in one run. Host only.

Owns the order of the measures and which outputs are kept to be shown; judges nothing (`gate.py` does).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from llmjax.quantization.agreement import Agreement, compare, finite_or_none
from llmjax.quantization.loops import is_loop
from llmjax.quantization.scores import Generation, Generator, Prompt, Scorer
from llmjax.quantization.tasks import Paired, Task, arithmetic_tasks

BATCH = 64
"""Prompts that a generator is given at once."""

BLOCK_TOKENS = 512
"""Of the first texts: as many as the blocks of both models are given. Their errors are the same for any text, nearly."""

BlockErrors = Callable[[Sequence[Sequence[int]]], Mapping[str, float]]
"""What `block_errors.block_errors` says of texts."""


class Subject(NamedTuple):
    """One model under measure. Both may be one object; without a generator nothing is generated."""

    scorer: Scorer
    generator: Generator | None = None


@dataclasses.dataclass(frozen=True)
class QualityData:
    """What the models are measured on. It should be held out: none of it used for calibration.

    Attributes:
        texts: token ids, each no longer than the models' context. Read once.
        prompts: for open outputs, which are searched for loops. Read once.
        tasks: with known answers. Read once.
        arithmetic: sums to ask, made from `seed`; 0 for models without a tokenizer.
        max_tokens: of an open output: short ones hide loops.
        answer_tokens: of an answer.
        shown: outputs of each kind that are kept, those on which the models differ first.
    """

    texts: Iterable[Sequence[int]]
    prompts: Iterable[Prompt] = ()
    tasks: Iterable[Task] = ()
    arithmetic: int = 0
    seed: int = 0
    max_tokens: int = 128
    answer_tokens: int = 32
    shown: int = 6


@dataclasses.dataclass(frozen=True)
class Sample:
    """One prompt with both outputs, as text (ids where there is no tokenizer). `*_yes`: looped, or solved."""

    kind: str
    prompt: str
    baseline: str
    candidate: str
    baseline_yes: bool
    candidate_yes: bool
    expected: str | None = None


@dataclasses.dataclass(frozen=True)
class Quality:
    """What was measured; None where nothing was asked for.

    Attributes:
        blocks: each block's error by that of plain rounding (`block_errors.py`); None where the two have no blocks to compare.
        loops: yes is an output that ran into a loop.
        exact_match, arithmetic: yes is a right answer.
        baseline_errors, candidate_errors: outputs that ended in an error (NaN), and what the first said.
    """

    agreement: Agreement
    blocks: Mapping[str, float] | None = None
    loops: Paired | None = None
    exact_match: Paired | None = None
    arithmetic: Paired | None = None
    baseline_errors: int = 0
    candidate_errors: int = 0
    first_error: str | None = None
    samples: tuple[Sample, ...] = ()

    @property
    def worst_block(self) -> tuple[str, float] | None:
        """Name and error of the block that is off most, NaN above all."""
        return max(self.blocks.items(), key=lambda one: math.inf if math.isnan(one[1]) else one[1]) if self.blocks else None

    def as_json(self) -> dict[str, Any]:
        """Plain data; what is not finite is None."""
        paired = {name: getattr(self, name) for name in ("loops", "exact_match", "arithmetic")}
        return {
            "agreement": self.agreement.as_json(),
            "blocks": None if self.blocks is None else {name: finite_or_none(value) for name, value in self.blocks.items()},
            **{name: None if one is None else one.as_json() for name, one in paired.items()},
            "baseline_errors": self.baseline_errors,
            "candidate_errors": self.candidate_errors,
            "first_error": self.first_error,
            "samples": [dataclasses.asdict(sample) for sample in self.samples],
        }


def measure_quality(
    baseline: Subject, candidate: Subject, data: QualityData, *, block_errors: BlockErrors | None = None
) -> Quality:
    """Read the texts with both models, look at the blocks of both over the first of them, then let both write.

    Same models and data, same result. Raises what the models raise for texts and prompts that they cannot take.
    """
    outputs = _Outputs(baseline.generator, candidate.generator, data.shown)
    texts = iter(data.texts)
    first = _first(texts, BLOCK_TOKENS) if block_errors else []
    sums = arithmetic_tasks(data.arithmetic, data.seed)
    return Quality(
        agreement=compare(baseline.scorer, candidate.scorer, itertools.chain(first, texts)),
        blocks=None if block_errors is None else block_errors(first),
        loops=outputs.pairs("loop", ((prompt, None, _loops) for prompt in data.prompts), data.max_tokens),
        exact_match=outputs.pairs("exact_match", _solved(data.tasks), data.answer_tokens),
        arithmetic=outputs.pairs("arithmetic", _solved(sums), data.answer_tokens),
        baseline_errors=outputs.errors[0],
        candidate_errors=outputs.errors[1],
        first_error=outputs.first_error,
        samples=tuple(outputs.samples),
    )


def _first(texts: Iterator[Sequence[int]], tokens: int) -> list[Sequence[int]]:
    """As many as have so many tokens, or all."""
    found: list[Sequence[int]] = []
    while sum(map(len, found)) < tokens and (text := next(texts, None)) is not None:
        found.append(text)
    return found


_Asked = tuple[Prompt, str | tuple[int, ...] | None, Callable[[Generation], bool]]


def _loops(output: Generation) -> bool:
    return is_loop(output.token_ids)


def _solved(tasks: Iterable[Task]) -> Iterator[_Asked]:
    return ((task.prompt, task.expected, task.solved_by) for task in tasks)


class _Outputs:
    """Lets both models write, and keeps counts and the outputs that are shown."""

    def __init__(self, baseline: Generator | None, candidate: Generator | None, shown: int) -> None:
        self._models = (baseline, candidate)
        self._shown = shown
        self.errors = [0, 0]
        self.first_error: str | None = None
        self.samples: list[Sample] = []

    def pairs(self, kind: str, asked: Iterable[_Asked], max_tokens: int) -> Paired | None:
        """Counts of what each model's output is told to be; None when nothing is asked, or nobody can answer."""
        baseline, candidate = self._models
        if baseline is None or candidate is None:
            return None
        counts = Paired()
        differ: list[Sample] = []
        alike: list[Sample] = []
        for batch in itertools.batched(asked, BATCH):
            prompts = [prompt for prompt, _, _ in batch]
            answers = [model.greedy(prompts, max_tokens) for model in (baseline, candidate)]
            yes = [[tell(one) for (_, _, tell), one in zip(batch, side, strict=True)] for side in answers]
            counts += Paired.of(*yes)
            for row, (prompt, expected, _) in enumerate(batch):
                pair = (answers[0][row], answers[1][row])
                self._count_errors(*pair)
                flags = (yes[0][row], yes[1][row])
                kept = differ if flags[0] != flags[1] else alike
                if len(kept) < self._shown:
                    told = None if expected is None else as_text(expected)
                    kept.append(Sample(kind, as_text(prompt), _output_text(pair[0]), _output_text(pair[1]), *flags, told))
        self.samples += [*differ, *alike][: self._shown]
        return counts if counts.count else None

    def _count_errors(self, *pair: Generation) -> None:
        for side, one in enumerate(pair):
            if one.error is not None:
                self.errors[side] += 1
                self.first_error = self.first_error or one.error


def as_text(prompt: Prompt) -> str:
    """A prompt for people."""
    return prompt if isinstance(prompt, str) else json.dumps(list(prompt), ensure_ascii=False)


def _output_text(output: Generation) -> str:
    if output.error is not None:
        return f"[{output.error}]"
    return output.text or as_text(output.token_ids)
