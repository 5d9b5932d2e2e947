"""What a launch's result means for one request: which tokens are its own, and what ended it. Knows no pages."""

from __future__ import annotations

import dataclasses

import numpy as np

from llmjax.scheduling.finish_reason import FinishReason
from llmjax.scheduling.request import Request, StepOutput


@dataclasses.dataclass(slots=True)
class RequestUpdate:
    """What a launch did for a request that had not ended before.

    Attributes:
        request: already brought up to date (`output_ids`, `finish_reason`, ...).
        column: its index in `StepOutput.batch.rows`, and its column in the result's arrays.
        tokens: the new token ids; number i is of step i of the launch. Empty after a chunk in the middle of the prompt.
        finished: whether the request ended with this launch.
    """

    request: Request
    column: int
    tokens: list[int]
    finished: bool


def read_row(output: StepOutput, column: int) -> tuple[list[int], FinishReason | None]:
    """Append what row `column` of a launch has given to its request; return it, and what ended the request, if something but its
    limit did."""
    row = output.batch.rows[column]
    tokens = output.token_lists[column][: row.samples]
    if output.batch.kind == "speculate":
        tokens = _reached(tokens, whole=bool(output.finite[:, column].all()))
    tokens, reason = read_tokens(row.request, tokens, output.finite[:, column])
    if not output.is_finite(column):
        reason = "error"  # the prompt's scores may be NaN where the logits are not
    return tokens, reason


def _reached(tokens: list[int], *, whole: bool) -> list[int]:
    """Of a row with drafts: its tokens in front of the places that it did not reach, and one such place where its logits were not
    finite."""
    given = tokens.index(-1) if -1 in tokens else len(tokens)
    assert given or not whole, "the device ended a row that the host's rules let go on"
    return tokens[:given] if whole else tokens[: given + 1]


def read_tokens(request: Request, sampled: list[int], finite: np.ndarray) -> tuple[list[int], FinishReason | None]:
    """Append the tokens of one row to its request, up to the one that ends it; return them and the reason, if it ended.
    A chunk in the middle of the prompt has no tokens, and ends the request if what it computed is not finite.

    The device decides by the same rules when a row stops: logits without a finite entry end it; a stop id ends it, and is
    masked while fewer than `min_tokens` tokens exist; the limit ends it. A stop id as the last token allowed is a "stop".
    """
    if not sampled and not finite[0]:
        return sampled, "error"
    for step, token in enumerate(sampled):
        if not finite[step]:
            return sampled[:step], "error"
        assert token >= 0, "the device ended a row that the host's rules let go on"
        stops = token in request.ending_ids and len(request.output_ids) >= request.params.min_tokens
        request.output_ids.append(token)
        if stops:
            request.stop_token = token
            return sampled[: step + 1], "stop"
    return sampled, None
