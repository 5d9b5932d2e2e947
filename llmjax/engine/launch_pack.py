"""`LaunchPack`: what a launch's packed vector says of its rows, in numpy. Owns the sizes; holds no array and launches nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from llmjax.engine.config import ResolvedConfig
from llmjax.engine.row_masks import RowMasks
from llmjax.engine.sample import MAX_BIAS, MAX_STOPS, PROMPT_BIT, SamplingSettings
from llmjax.engine.speculative import catch_up_layout, speculate_layout
from llmjax.engine.state import (
    HISTORY_A_RESET,
    MASKS_A_RESET,
    SEEN_A_RESET,
    KnownTokens,
    RowReset,
    SeenTokens,
    mask_slot,
    no_known_tokens,
    no_seen_tokens,
    pack_masks,
    pack_resets,
)
from llmjax.engine.step import decode_layout, extend_layout
from llmjax.scheduling.request import Request, ScheduledBatch, ScheduledRow

Piece = tuple[int, int, int]
"""Of a catch-up launch: device row, first position, tokens."""


class LaunchPack:
    """Packs launches for the programs of these sizes.

    Attributes:
        draft_temperature: of drafts, relative to the rows' own; it is data, and may change between two launches.
    """

    def __init__(self, engine_config: ResolvedConfig) -> None:
        self._rows, self._page_size = engine_config.max_sequences, engine_config.page_size
        self._max_pages = engine_config.max_pages
        self._speculative = engine_config.speculative
        self.draft_temperature = 1.0 if engine_config.speculative is None else engine_config.speculative.temperature

    def padding(self, kind: str, size: int, steps: int) -> np.ndarray:
        """The packed vector of a launch without any row."""
        if kind == "reset":
            return self._resets([], no_seen_tokens(), no_known_tokens())
        if kind == "wipe":
            return np.zeros(size, np.int32)
        if kind == "decode":
            return self.decode(ScheduledBatch(0, "decode", steps, []), size, steps)
        if kind == "speculate":
            return self.speculate(ScheduledBatch(0, "speculate", 1, [], draft_length=steps), size)
        if kind == "catch_up":
            return self.catch_up([], size)
        return self.extend(ScheduledBatch(0, "extend", 1, []), size)

    def decode(self, batch: ScheduledBatch, size: int, steps: int) -> np.ndarray:
        """A decode launch in a bucket of `size` rows; see `decode_layout`."""
        layout = decode_layout(rows=size, num_steps=steps, page_size=self._page_size)
        rows = np.full(size, self._rows, np.int32)
        rows[: len(batch.rows)] = [row.row for row in batch.rows]
        return layout.pack(rows=rows, **self._pages(batch.rows, dict(layout.sizes)["page_ids"]))

    def speculate(self, batch: ScheduledBatch, size: int, masks: Sequence[RowMasks] = ()) -> np.ndarray:
        """A speculate launch, likewise. Rows with masks have just the drafts that were made for them, perhaps none."""
        assert self._speculative is not None
        layout = speculate_layout(rows=size, length=batch.draft_length, page_size=self._page_size)
        rows, drafts = np.full(size, self._rows, np.int32), np.zeros(size, np.int32)
        rows[: len(batch.rows)] = [row.row for row in batch.rows]
        made = {one.row: len(one.drafts) for one in masks}
        drafts[: len(batch.rows)] = [made.get(row.row, row.drafts) for row in batch.rows]
        temperature = np.array([self.draft_temperature], np.float32).view(np.int32)
        pages = self._pages(batch.rows, dict(layout.sizes)["page_ids"])
        return layout.pack(rows=rows, drafts=drafts, temperature=temperature, **pages)

    def masks(self, masks: Sequence[RowMasks]) -> Iterator[tuple[np.ndarray | None, np.ndarray]]:
        """The two vectors of as many `reset_rows` calls as these masks take, at most `MASKS_A_RESET` in each: the drafts, None
        where there are none, and the masks."""
        num_rows = self._rows + 1
        slots = [mask_slot(one.row, place, num_rows=num_rows) for one in masks for place in range(len(one.allowed))]
        allowed = [mask for one in masks for mask in one.allowed]
        drafts = _drafted_tokens(masks)
        for call, first in enumerate(range(0, len(slots), MASKS_A_RESET)):  # each draft has a mask, so that these are enough
            some = slice(first, first + MASKS_A_RESET)
            packed = pack_masks(slots[some], allowed[some], num_words=len(allowed[0]))
            known = KnownTokens(*(array[call * HISTORY_A_RESET : (call + 1) * HISTORY_A_RESET] for array in drafts))
            yield self._resets([], no_seen_tokens(), known) if len(known.rows) else None, packed

    def holes(self, rows: list[ScheduledRow], size: int) -> Iterator[list[Piece]]:
        """What a draft model has not seen of rows that are to draft, in launches of at most `size` tokens."""
        pieces: list[Piece] = []
        room = size
        for row in rows:
            start, end = row.catch_up
            while start < end:
                count = min(end - start, room)
                pieces.append((row.row, start, count))
                start, room = start + count, room - count
                if room == 0 or len(pieces) == min(size, self._rows):
                    yield pieces
                    pieces, room = [], size
        if pieces:
            yield pieces

    def catch_up(self, pieces: list[Piece], size: int) -> np.ndarray:
        """A catch-up launch of `size` tokens; see `catch_up_layout`."""
        entries = min(size, self._rows)
        query_starts, rows = np.zeros(entries + 1, np.int32), np.full(entries, self._rows, np.int32)
        starts = np.zeros(entries, np.int32)
        for i, (row, start, count) in enumerate(pieces):
            rows[i], starts[i], query_starts[i + 1] = row, start, query_starts[i] + count
        query_starts[len(pieces) + 1 :] = query_starts[len(pieces)]
        return catch_up_layout(rows=entries).pack(query_starts=query_starts, rows=rows, starts=starts)

    def extend(self, batch: ScheduledBatch, size: int) -> np.ndarray:
        """An extend launch of `size` tokens; see `extend_layout`."""
        entries = min(size, self._rows)
        layout = extend_layout(tokens=size, rows=entries, page_size=self._page_size)
        tokens = np.full(size, -1, np.int32)
        starts = np.zeros(entries + 1, np.int32)
        rows = np.full(entries, self._rows, np.int32)
        samples = np.zeros(entries, np.int32)
        next_tokens = np.full(entries, -1, np.int32)
        used = 0
        for i, row in enumerate(batch.rows):
            tokens[used : used + len(row.token_ids)] = row.token_ids
            used += row.num_tokens
            starts[i + 1] = used
            rows[i], samples[i] = row.row, row.samples
            end = row.start + row.num_tokens
            if row.wants_prompt_logprobs and end < row.request.num_prompt_tokens:
                next_tokens[i] = row.request.prompt_ids[end]
        starts[len(batch.rows) + 1 :] = used
        return layout.pack(
            tokens=tokens, query_starts=starts, rows=rows, samples=samples, next_tokens=next_tokens,
            **self._pages(batch.rows, dict(layout.sizes)["page_ids"]),
        )  # fmt: skip

    def _pages(self, rows: list[ScheduledRow], size: int) -> dict[str, np.ndarray]:
        """Pages appended to rows that are not new (a new row's whole table went with its reset)."""
        growing = [row for row in rows if row.new_pages and not row.is_new]
        appended = [(row.row, index, page) for row in growing for index, page in row.new_pages]
        assert len(appended) <= size, f"{len(appended)} pages appended in a launch that takes {size}"
        out = np.zeros((3, size), np.int32)
        out[0] = self._rows
        if appended:
            out[:, : len(appended)] = np.asarray(appended, np.int32).T
        return {"page_rows": out[0], "page_indices": out[1], "page_ids": out[2]}

    def resets(self, rows: list[ScheduledRow]) -> Iterator[np.ndarray]:
        """The vectors of as many `reset_rows` calls as new rows take, at most `ROWS_A_RESET` of them."""
        resets = [self._reset(row) for row in rows]
        seen, known = _seen_tokens(rows), no_known_tokens() if self._speculative is None else _known_tokens(rows)
        calls = max(1, -(-len(seen.rows) // SEEN_A_RESET), -(-len(known.rows) // HISTORY_A_RESET))
        for call in range(calls):
            some_seen = SeenTokens(*(array[call * SEEN_A_RESET : (call + 1) * SEEN_A_RESET] for array in seen))
            some_known = KnownTokens(*(array[call * HISTORY_A_RESET : (call + 1) * HISTORY_A_RESET] for array in known))
            yield self._resets(resets, some_seen, some_known)
            resets = []  # once is enough

    def _resets(self, resets: list[RowReset], seen: SeenTokens, known: KnownTokens) -> np.ndarray:
        return pack_resets(resets, seen, max_pages=self._max_pages, known=None if self._speculative is None else known)

    def _reset(self, row: ScheduledRow) -> RowReset:
        request, params = row.request, row.request.params
        table = np.zeros(self._max_pages, np.int32)
        table[: len(request.pages)] = request.pages
        bias = dict(params.logit_bias or {})
        settings = SamplingSettings(
            temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p,
            repetition_penalty=params.repetition_penalty, presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            seed=np.array([request.seed & 0xFFFFFFFF, (request.seed >> 32) & 0xFFFFFFFF], np.uint32),
            choice=request.choice,
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            processed_logprobs=params.logprobs_mode == "processed",
            min_tokens=params.min_tokens,
            stop_ids=padded(list(request.stop_ids), MAX_STOPS, -1, np.int32),
            bias_ids=padded(list(bias), MAX_BIAS, -1, np.int32),
            bias_values=padded(list(bias.values()), MAX_BIAS, 0.0, np.float32),
        )  # fmt: skip
        return RowReset(row.row, row.start, request.num_prompt_tokens, request.limit, table, settings)


def _seen_tokens(rows: list[ScheduledRow]) -> SeenTokens:
    """Counts of the tokens that rows with a penalty found in the prefix cache; the others are counted as they are computed."""
    found = [no_seen_tokens()]
    for row in rows:
        if not row.start or not _has_penalty(row.request):
            continue
        prompt = min(row.start, row.request.num_prompt_tokens)
        ids, places = np.unique(np.asarray(row.request.known_ids(0, row.start), np.int32), return_inverse=True)
        counts = np.bincount(places[prompt:], minlength=len(ids)).astype(np.int32)
        counts[places[:prompt]] += np.int32(PROMPT_BIT)  # once, however often the id is there
        found.append(SeenTokens(np.full(len(ids), row.row, np.int32), ids, counts))
    return SeenTokens(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))


def _known_tokens(rows: list[ScheduledRow]) -> KnownTokens:
    """The tokens that rows found in the prefix cache; the others go into the history as they are computed."""
    found = [no_known_tokens()]
    for row in rows:
        ids = np.asarray(row.request.known_ids(0, row.start), np.int32)
        found.append(KnownTokens(np.full(row.start, row.row, np.int32), np.arange(row.start, dtype=np.int32), ids))
    return KnownTokens(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))


def _drafted_tokens(masks: Sequence[RowMasks]) -> KnownTokens:
    """The drafts that were made for masked rows, to stand behind their last tokens."""
    entries = [(one.row, one.position + place, token) for one in masks for place, token in enumerate(one.drafts)]
    return KnownTokens(*np.asarray(entries, np.int32).T) if entries else no_known_tokens()


def _has_penalty(request: Request) -> bool:
    params = request.params
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)


def padded(values: list[Any], size: int, fill: float, dtype: Any) -> np.ndarray:
    """The values and as much of `fill` as makes `size` of them."""
    assert len(values) <= size
    out = np.full(size, fill, dtype)
    out[: len(values)] = values
    return out
