"""What a launch means for outputs that must keep to a form: the masks it needs, and where its tokens lead. No JAX.

Joins `GrammarMatcher`s, which know tokens only, with the rows of launches. A matcher is a choice's, and lives as long as its
request: a preemption changes nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from llmjax.engine.grammar import GrammarCompiler, GrammarMatcher
from llmjax.engine.output_processor import LiveRequest
from llmjax.scheduling.request import Request, ScheduledBatch
from llmjax.scheduling.results import RequestUpdate


def launch_masks(batch: ScheduledBatch, owners: Mapping[Request, LiveRequest]) -> list[tuple[int, np.ndarray]]:
    """The device row and the mask of each row of a launch that samples and has one."""
    rows = [row for row in batch.rows if row.request.stepwise and row.samples]
    return [(row.row, owners[row.request].matcher(row.request).allowed) for row in rows]


def follow(compiler: GrammarCompiler, updates: Sequence[RequestUpdate], owners: Mapping[Request, LiveRequest]) -> None:
    """Take the tokens of a launch into the matchers, and find the next mask of each that goes on."""
    going: list[GrammarMatcher] = []
    for update in updates:
        request = update.request
        if not request.stepwise or not update.tokens or request.finish_reason not in (None, "length"):
            continue
        matcher = owners[request].matcher(request)
        (token,) = update.tokens
        if matcher.take(token):
            going.append(matcher)  # also at its limit: it may be complete
    compiler.fill(going)
