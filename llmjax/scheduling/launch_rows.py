"""`LaunchRows`: a request's part in a launch. Takes the pages that it needs and counts its tokens as dispatched, and when the
launch has been read, takes back what was promised and not given.

Decides nothing: who is launched, and how far, is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmjax.scheduling.held_pages import HeldPages
from llmjax.scheduling.page_pool import PagePool
from llmjax.scheduling.request import Request, ScheduledRow


class LaunchRows:
    """Makes the rows of launches, over the pages of `pool`."""

    def __init__(self, pool: PagePool, pages: HeldPages, *, prefill_chunk: int) -> None:
        self._pool, self._pages = pool, pages
        self._prefill_chunk = prefill_chunk

    def decode(self, decoding: Sequence[Request], num_steps: int, step_id: int) -> list[ScheduledRow]:
        """One launch of `num_steps` steps for rows that decode: takes the pages, and counts their tokens as promised."""
        rows = []
        for request in decoding:
            samples = 1 if num_steps == 1 or request.stepwise else min(num_steps, request.num_left)
            rows.append(self._promise(request, samples, step_id))
            request.num_steps += samples
        return rows

    def speculate(self, decoding: Sequence[Request], drafts: Sequence[int], step_id: int, *, fills: bool) -> list[ScheduledRow]:
        """One launch in which rows take up to so many drafts and one token more. Promised is the most that may come of it.

        Args:
            fills: there is a draft model, which must have seen all tokens of a row that drafts. It drafts for no stepwise one,
                and sees no more than the last two tokens of it in a launch.
        """
        rows = []
        for request, wanted in zip(decoding, drafts, strict=True):
            samples = min(wanted + 1, request.num_left)
            row = self._promise(request, samples, step_id)
            row.drafts = samples - 1
            request.num_steps += 1
            seen = row.start - 1  # the draft model takes the last two tokens in any case
            if fills and row.drafts and not request.stepwise and request.num_drafted < seen:
                # What is in flight may have come less far than it was promised, and the hole begin as much earlier.
                row.catch_up = (min(request.num_drafted, request.num_tokens - 1), seen)
                request.num_drafted = seen
            if request.num_drafted >= seen:
                # Of the last draft it has not seen more than that it made it: that one may be missing.
                request.num_drafted = row.start if request.stepwise else request.num_computed_tokens - 1
            rows.append(row)
        return rows

    def pages_missing(self, decoding: Sequence[Request], drafts: Sequence[int]) -> int:
        """Pages that `speculate` would take."""
        pool = self._pool
        ends = (r.num_computed_tokens + min(wanted + 1, r.num_left) for r, wanted in zip(decoding, drafts, strict=True))
        return sum(max(0, pool.pages_for(end) - len(r.pages)) for r, end in zip(decoding, ends, strict=True))

    def chunk(self, request: Request, budget: int, step_id: int, *, is_new: bool = False) -> ScheduledRow:
        """At most `budget` known tokens of one request: takes all its pages, and counts the tokens as computed."""
        start = request.num_computed_tokens
        end = min(request.num_prefill_tokens, start + min(self._prefill_chunk, budget))
        # A chunk samples when it reaches the last known token, unless only prompt logprobs were asked for.
        samples = int(end == request.num_prefill_tokens and request.num_left > 0)
        row = ScheduledRow(
            request=request,
            row=request.row,
            epoch=request.epoch,
            start=start,
            num_tokens=end - start,
            token_ids=request.known_ids(start, end),
            samples=samples,
            is_new=is_new,
            new_pages=self._pages.take(request, request.num_prefill_tokens, step_id, all_new=is_new),
            wants_prompt_logprobs=request.scores_prompt and start < request.num_prompt_tokens,
        )
        if request.num_drafted >= start:
            request.num_drafted = end
        request.num_computed_tokens = end
        request.num_in_flight += samples
        request.num_left -= samples
        request.num_chunks += 1
        request.last_step = step_id
        return row

    def _promise(self, request: Request, samples: int, step_id: int) -> ScheduledRow:
        start = request.num_computed_tokens
        end = start + samples
        new_pages: Sequence[tuple[int, int]] = ()
        if end > self._pool.page_size * len(request.pages):
            new_pages = self._pages.take(request, end, step_id)
        request.num_computed_tokens = end
        request.num_in_flight += samples
        request.num_left -= samples
        request.last_step = step_id
        return ScheduledRow(request, request.row, request.epoch, start, samples, (), samples, False, new_pages)


def take_back(request: Request, count: int) -> None:
    """A launch that was just read gave `count` tokens less than it promised, and the request goes on.

    All that was dispatched behind it begins so much earlier than it was thought to.
    """
    request.num_computed_tokens -= count
    request.num_left += count
    reached = request.num_tokens - 1  # computed tokens after that launch
    if request.num_drafted >= reached + count:
        request.num_drafted -= count
    else:
        request.num_drafted = min(request.num_drafted, reached)


def note_ended(request: Request) -> None:
    """A request has ended. A launch in flight that was to show its draft model the last computed token finds the row ended."""
    if request.num_in_flight:
        request.num_drafted = min(request.num_drafted, request.num_tokens - 2)


def note_joined(rows: Sequence[ScheduledRow]) -> None:
    """These rows decode in an extend launch, where a draft model computes their tokens too."""
    for row in rows:
        if row.request.num_drafted >= row.start:
            row.request.num_drafted = row.start + 1
