"""What a launch means for outputs that must keep to a form: their masks and drafts, and where its tokens lead. No JAX.

Joins `GrammarMatcher`s, which know tokens only, with the rows of launches. A matcher is a choice's, and lives as long as its
request: a preemption changes nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmjax.engine.grammar import GrammarCompiler, GrammarMatcher
from llmjax.engine.grammar_drafts import FormToDraft, draft_forms
from llmjax.engine.output_processor import LiveRequest
from llmjax.engine.row_masks import RowMasks
from llmjax.scheduling.request import Request, ScheduledBatch
from llmjax.scheduling.results import RequestUpdate
from llmjax.scheduling.speculation_config import SpeculationConfig


def launch_masks(
    batch: ScheduledBatch,
    owners: Mapping[Request, LiveRequest],
    compiler: GrammarCompiler,
    speculative: SpeculationConfig | None,
) -> list[RowMasks]:
    """The masks of each row of a launch that samples and has one, and the drafts of those that may have some."""
    rows = [row for row in batch.rows if row.request.stepwise and row.samples]
    matchers = [owners[row.request].matcher(row.request) for row in rows]
    if batch.kind != "speculate" or not rows:
        return [RowMasks(row.row, (matcher.allowed,)) for row, matcher in zip(rows, matchers, strict=True)]
    assert speculative is not None
    forms = [
        FormToDraft(matcher, owners[row.request].lookup(row.request), row.drafts)
        for row, matcher in zip(rows, matchers, strict=True)
    ]
    made = draft_forms(compiler, forms, shortest=speculative.ngram_min, longest=speculative.ngram_max)
    return [RowMasks(row.row, one.allowed, one.drafts, row.request.num_tokens) for row, one in zip(rows, made, strict=True)]


def follow(compiler: GrammarCompiler, updates: Sequence[RequestUpdate], owners: Mapping[Request, LiveRequest]) -> None:
    """Take the tokens of a launch into the matchers, and find the next mask of each that goes on."""
    going: list[GrammarMatcher] = []
    for update in updates:
        request = update.request
        if not request.stepwise or not update.tokens or request.finish_reason not in (None, "length"):
            continue
        matcher = owners[request].matcher(request)
        if all(matcher.take(token) for token in update.tokens):  # only the last can complete it: see `FormDrafts`
            going.append(matcher)  # also at its limit: it may be complete
    compiler.fill(going)
