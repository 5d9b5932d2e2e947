"""The work of the `gate` stage: both models in memory, what they are measured on, the verdict in the store and on the screen.

Owns where a verdict is kept and when it counts. What is measured and judged is `llmjax.quantization`'s. Host side: what starts
JAX is imported in functions.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmjax.errors import ConfigError, GateRejectedError, StoreError
from llmjax.pipeline.digest import write_whole
from llmjax.pipeline.model_source import ModelSource, StoredModel, open_model
from llmjax.pipeline.quantize_runner import read_report, write_report
from llmjax.pipeline.sample_data import read_data
from llmjax.pipeline.stages import Rejection
from llmjax.pipeline.store import Store

if TYPE_CHECKING:
    from llmjax.engine.tokenizer import Tokenizer
    from llmjax.model.checkpoint.load import LoadedModel
    from llmjax.pipeline.stages import StageContext
    from llmjax.pipeline.stages.gate import GateSection
    from llmjax.quantization.gate import Verdict
    from llmjax.quantization.quality import QualityData, Subject

VERDICT = "verdict.json"
PROMPT_TOKENS = 32
"""Of a text, what an open output goes on from."""

_ROWS = 16
_STEP_TOKENS = 512
_PAGE_SIZE = 16


def run_gate(context: StageContext[GateSection]) -> Any:
    """The candidate when it passes, else a `Rejection` with the baseline.

    A verdict of the same models, data and limits that is in the store counts, unless the stage is forced.

    Raises `GateRejectedError` for a refused candidate with `on_fail: stop`, and what reading data and loading models raise.
    """
    baseline, candidate = context.inputs["baseline"], context.inputs["candidate"]
    if candidate is baseline:
        raise ConfigError("the gate's baseline and candidate are the same model: name two stages")
    store, kind = Store(context.artifacts / "store"), "gate"
    folder = store.folder(kind, context.key)
    if not context.again and store.has(kind, context.key):
        context.reporter.message("info", f"{context.name}: the verdict is in the store; --force {context.name} measures again")
    else:
        verdict = _measure(baseline, candidate, context)
        inputs = {"baseline": baseline.key, "candidate": candidate.key}
        with store.writing(kind, context.key, {"stage": context.name, "inputs": inputs}) as aside:
            write_whole(aside / VERDICT, json.dumps(verdict.as_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
            _report(aside, candidate, verdict)
    told = _read(folder / VERDICT)
    for line in table(told):
        context.reporter.message("info", line)
    context.reporter.message("info", f"{context.name}: {folder}")
    if told["passed"]:
        return candidate
    why = "the candidate is refused: " + "; ".join(check["reason"] for check in told["checks"] if not check["passed"])
    if context.config.on_fail == "stop":
        raise GateRejectedError(why)
    return Rejection(baseline, why)


def table(verdict: Mapping[str, Any]) -> list[str]:
    """The verdict's checks as lines of one table."""
    rows = [("check", "", "value", "limit")]
    for check in verdict["checks"]:
        value = "none" if check["value"] is None else f"{check['value']:.5g}"
        allowed = f" +- {check['allowance']:.3g}" if check["allowance"] else ""
        rows.append(
            (check["name"], "ok" if check["passed"] else "REFUSED", value, f"{check['bound']} {check['limit']:g}{allowed}")
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _read(path: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads(path.read_text("utf-8"))
        sound = isinstance(told["passed"], bool) and all(isinstance(check["reason"], str) for check in told["checks"])
    except (OSError, ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise StoreError(f"{path} is damaged; delete {path.parent} to measure again") from None
    return told


def _measure(baseline: ModelSource, candidate: ModelSource, context: StageContext[GateSection]) -> Verdict:
    from llmjax.quantization.block_errors import Weights, block_errors, comparable
    from llmjax.quantization.gate import judge
    from llmjax.quantization.quality import measure_quality

    config = context.config
    loaded = open_model(baseline, context)
    tokenizer = baseline.tokenizer_files(loaded).open()
    data = _data(tokenizer, loaded, context)
    other = open_model(candidate, context)
    writes = bool(config.outputs or config.tasks or config.arithmetic)
    sides = [_subject(model, tokenizer, writes, context) for model in (loaded, other)]
    ours, theirs = (Weights(model.params, model.config) for model in (loaded, other))
    blocks = functools.partial(block_errors, ours, theirs) if comparable(ours, theirs) else None
    quality = measure_quality(sides[0], sides[1], data, block_errors=blocks)
    return judge(quality, config.gate_limits(), on_fail=config.on_fail)


def _data(tokenizer: Tokenizer | None, loaded: LoadedModel, context: StageContext[GateSection]) -> QualityData:
    from llmjax.quantization.quality import QualityData
    from llmjax.quantization.tasks import read_tasks

    config = context.config
    if config.arithmetic and tokenizer is None:
        raise ConfigError("arithmetic: the model has no tokenizer to be asked with")
    texts = [
        sample[: min(config.sequence_length, loaded.config.max_positions)]
        for sample in read_data(config.data, tokenizer, context.reporter).ids
    ]
    _check_tokens(texts, loaded, config.data.path)
    prompts = [text[:PROMPT_TOKENS] for text in texts if text][: config.outputs]
    if config.prompts is not None:
        found = read_data(config.prompts, tokenizer, context.reporter, count=config.outputs, seed=config.seed).ids
        longest = min(config.sequence_length, loaded.config.max_positions - config.output_tokens)
        prompts = [prompt[-longest:] for prompt in found]
        _check_tokens(prompts, loaded, config.prompts.path)
    return QualityData(
        _told(texts, context),
        prompts=prompts,
        tasks=() if config.tasks is None else read_tasks(Path(config.tasks)),
        arithmetic=config.arithmetic,
        seed=config.seed,
        max_tokens=config.output_tokens,
    )


def _told(texts: Sequence[Sequence[int]], context: StageContext[GateSection]) -> Iterator[Sequence[int]]:
    """The texts, with progress: one counts when the next is asked for."""
    for done, text in enumerate(texts):
        context.reporter.progress(context.name, done, len(texts))
        yield text
    context.reporter.progress(context.name, len(texts), len(texts))


def _check_tokens(texts: Sequence[Sequence[int]], loaded: LoadedModel, path: str) -> None:
    known = loaded.config.num_tokens
    for token in itertools.chain.from_iterable(texts):
        if not 0 <= token < known:
            raise ConfigError(f"{path}: token id {token} is not one of the model's, 0 to {known - 1}")


def _subject(loaded: LoadedModel, tokenizer: Tokenizer | None, writes: bool, context: StageContext[GateSection]) -> Subject:
    """A model that reads by itself, with whole distributions, and writes through an engine as a server would."""
    from llmjax.engine.config import EngineConfig
    from llmjax.engine.llm import LLM
    from llmjax.model.kv_cache import cache_bytes_per_page
    from llmjax.quantization.engine_model import EngineModel
    from llmjax.quantization.forward_model import ForwardModel
    from llmjax.quantization.quality import Subject

    reader = ForwardModel(loaded.params, loaded.config)
    if not writes:
        return Subject(reader)
    section = context.config
    length = min(loaded.config.max_positions, section.sequence_length + section.output_tokens)
    pages = _ROWS * -(-length // _PAGE_SIZE) + _ROWS + 1
    config = EngineConfig(
        max_context=length,
        page_size=_PAGE_SIZE,
        kv_cache_bytes=pages * cache_bytes_per_page(loaded.config, _PAGE_SIZE),
        max_sequences=_ROWS,
        max_tokens_per_step=_STEP_TOKENS,
        row_buckets=(_ROWS,),  # one program of each kind: a gate asks little, and compiling takes long
        token_buckets=(_STEP_TOKENS,),
        compile_cache=str(context.artifacts / "compile_cache"),
    )
    return Subject(reader, EngineModel(LLM(loaded, engine_config=config, tokenizer=tokenizer)))


def _report(folder: Path, candidate: ModelSource, verdict: Verdict) -> None:
    """The candidate's own report, where it has one, with the verdict."""
    from llmjax.quantization.report import QuantizationReport

    own = read_report(candidate.folder) if isinstance(candidate, StoredModel) else None
    if own is None:
        date = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
        own = QuantizationReport(title=candidate.name or "candidate", date=date, layers=())
    write_report(folder, dataclasses.replace(own, verdict=verdict.as_json()))
