"""`ModelRunner`: the one place where host and device meet. `ScheduledBatch` in, `StepOutput` out.

It owns the parameters, the KV cache and the `DeviceState`, and the compiled programs. It decides nothing: which rows run is the
scheduler's, what they mean is the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.engine.compile_counter import CompileCounter
from llmjax.engine.compile_programs import Key
from llmjax.engine.config import ResolvedConfig
from llmjax.engine.sample import MAX_BIAS, MAX_STOPS, PROMPT_BIT, SamplingSettings
from llmjax.engine.state import (
    MASKS_A_RESET,
    ROWS_A_RESET,
    SEEN_A_RESET,
    DeviceState,
    RowReset,
    SeenTokens,
    init_state,
    no_seen_tokens,
    pack_masks,
    pack_resets,
)
from llmjax.engine.step import decode_layout, extend_layout
from llmjax.engine.token_masks import num_mask_words
from llmjax.errors import ModelError
from llmjax.model.kv_cache import NULL_PAGE, PAGES_A_WIPE, KVCache, init_cache, with_key_channels
from llmjax.model.registry import DecoderConfig
from llmjax.scheduling.buckets import pick
from llmjax.scheduling.request import PromptScores, Request, ScheduledBatch, ScheduledRow, StepOutput, TopLogprobs


def on_device(params: Any) -> Any:
    """The same parameters with host arrays put on the default device: they would else be sent with every launch."""
    return jax.tree.map(jnp.asarray, params)


class PendingStep:
    """A launch that was dispatched; `result()` waits for it and brings its small outputs to the host."""

    def __init__(self, batch: ScheduledBatch, tokens: Any, scores: Any) -> None:
        self.batch = batch
        self._tokens, self._scores = tokens, scores
        self._wants_top = any(row.request.params.logprobs for row in batch.rows)
        self._wants_scores = any(row.wants_prompt_logprobs for row in batch.rows)
        tokens.summary.copy_to_host_async()
        if self._wants_top:
            tokens.top_ids.copy_to_host_async()
            tokens.top_logprobs.copy_to_host_async()

    def result(self) -> StepOutput:
        """The launch's outputs as numpy, cut to the rows that were scheduled."""
        rows = len(self.batch.rows)
        summary = np.asarray(self._tokens.summary)[:, :rows]
        top = scores = None
        if self._wants_top:
            top = TopLogprobs(np.asarray(self._tokens.top_ids)[:, :rows], np.asarray(self._tokens.top_logprobs)[:, :rows])
        if self._wants_scores:
            used = self.batch.num_tokens
            scores = PromptScores(*(np.asarray(a)[:used] for a in self._scores))
        return StepOutput(
            batch=self.batch,
            tokens=summary[..., 0],
            logprobs=np.ascontiguousarray(summary[..., 1]).view(np.float32),
            ranks=summary[..., 2],
            finite=summary[..., 3].astype(bool),
            top=top,
            prompt_scores=scores,
        )


class ModelRunner:
    """Launches the step programs of one model.

    Args:
        config, params: what to run; `params` are held, not copied; see `on_device`.
        engine_config: sizes, as `EngineConfig.resolved` gives them.
        num_pages: pages a layer, the null page included.
        executables: the compiled programs (`compile_programs`) for just these sizes.
        key_channels: of an int8 cache, if others than ones; they stay as they are when the parameters are updated.

    Buffers: the runner owns cache and state; every launch donates them and takes the returned ones.
    """

    def __init__(
        self,
        config: DecoderConfig,
        params: Any,
        engine_config: ResolvedConfig,
        *,
        num_pages: int,
        executables: Mapping[Key, Any],
        key_channels: jax.Array | None = None,
    ) -> None:
        self._params = params
        self._rows = engine_config.max_sequences
        self._page_size = engine_config.page_size
        self._max_pages = -(-engine_config.max_context // engine_config.page_size)
        self.row_buckets, self.token_buckets = engine_config.row_buckets, engine_config.token_buckets
        self.num_pages = num_pages
        cache = init_cache(config, num_pages=num_pages, page_size=self._page_size, dtype=engine_config.kv_cache_dtype)
        self._cache: KVCache = cache if key_channels is None else with_key_channels(cache, key_channels)
        self._state = init_state(max_sequences=self._rows, max_pages=self._max_pages, vocab_size=config.vocab_size)
        self._compiles_after_ready = 0
        self._executables = executables
        self._num_words = num_mask_words(config.vocab_size)
        # On the device, so that a reset sends no empty masks and a mask no empty resets.
        self._no_masks = jnp.asarray(pack_masks([], [], num_words=self._num_words))
        self._no_resets = jnp.asarray(pack_resets([], no_seen_tokens(), max_pages=self._max_pages))

    @property
    def compiles_after_ready(self) -> int:
        """Programs XLA compiled during a launch since `warm_up` ended. Stays 0: that is what the programs are for."""
        return self._compiles_after_ready

    @property
    def params(self) -> Any:
        """The parameters in use."""
        return self._params

    @property
    def arrays(self) -> tuple[Any, KVCache, DeviceState]:
        """What is held on the device: parameters, cache and state. The next launch donates the latter two: look, do not keep."""
        return self._params, self._cache, self._state

    # -- programs

    def wait(self) -> None:
        """Until parameters, cache and state are there: allocating is asynchronous, and so is its failing."""
        jax.block_until_ready((self._params, self._cache, self._state))

    def warm_up(self) -> None:
        """Run every program once on padding rows, so that serving loads and allocates nothing."""
        for key in self._executables:
            self._launch(key, self._padding(*key))
        jax.block_until_ready(self._cache)
        self._compiles_after_ready = 0

    def _padding(self, kind: str, size: int, steps: int) -> np.ndarray:
        """The packed vector of a launch without any row."""
        if kind == "reset":
            return pack_resets([], no_seen_tokens(), max_pages=self._max_pages)
        if kind == "wipe":
            return np.zeros(size, np.int32)
        if kind == "decode":
            return self._pack_decode(ScheduledBatch(0, "decode", steps, []), size, steps)
        return self._pack_extend(ScheduledBatch(0, "extend", 1, []), size)

    def _launch(self, key: Key, packed: Any, masks: Any = None) -> tuple[Any, Any]:
        executable = self._executables[key]
        compiled = CompileCounter()
        tokens = scores = None
        if key[0] == "reset":
            self._state = executable(self._state, packed, self._no_masks if masks is None else masks)
        elif key[0] == "wipe":
            self._cache = executable(self._cache, packed)
        elif key[0] == "decode":
            self._state, tokens, self._cache = executable(self._params, self._state, packed, self._cache)
        else:
            self._state, tokens, scores, self._cache = executable(self._params, self._state, packed, self._cache)
        self._compiles_after_ready += compiled.count
        return tokens, scores

    # -- launches

    def dispatch(self, batch: ScheduledBatch, masks: Sequence[tuple[int, np.ndarray]] = ()) -> PendingStep:
        """Launch a batch. Returns at once; launches run in the order of dispatch.

        Args:
            masks: of rows that sample only some tokens: the row, and int32 [W] as `DeviceState.allowed` has it. They hold for one
                token: a row that has once had a mask gets another for each.
        """
        for first in range(0, len(batch.dirty_pages), PAGES_A_WIPE):
            pages = list(batch.dirty_pages[first : first + PAGES_A_WIPE])
            self._launch(("wipe", PAGES_A_WIPE, 1), _padded(pages, PAGES_A_WIPE, NULL_PAGE, np.int32))
        new = [row for row in batch.rows if row.is_new]
        for first in range(0, len(new), ROWS_A_RESET):
            self._reset_rows(new[first : first + ROWS_A_RESET])
        for first in range(0, len(masks), MASKS_A_RESET):
            rows, allowed = zip(*masks[first : first + MASKS_A_RESET], strict=True)
            packed = pack_masks(rows, allowed, num_words=self._num_words)
            self._launch(("reset", ROWS_A_RESET, 1), self._no_resets, packed)
        if batch.kind == "decode":
            size = pick(self.row_buckets, len(batch.rows))
            tokens, scores = self._launch(("decode", size, batch.num_steps), self._pack_decode(batch, size, batch.num_steps))
        else:
            size = pick(self.token_buckets, batch.num_tokens)
            tokens, scores = self._launch(("extend", size, 1), self._pack_extend(batch, size))
        return PendingStep(batch, tokens, scores)

    def _pack_decode(self, batch: ScheduledBatch, size: int, steps: int) -> np.ndarray:
        layout = decode_layout(rows=size, num_steps=steps, page_size=self._page_size)
        rows = np.full(size, self._rows, np.int32)
        rows[: len(batch.rows)] = [row.row for row in batch.rows]
        return layout.pack(rows=rows, **self._pages(batch.rows, dict(layout.sizes)["page_ids"]))

    def _pack_extend(self, batch: ScheduledBatch, size: int) -> np.ndarray:
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

    def _reset_rows(self, rows: list[ScheduledRow]) -> None:
        resets = [self._reset(row) for row in rows]
        seen = _seen_tokens(rows)
        for first in range(0, max(1, len(seen.rows)), SEEN_A_RESET):
            piece = SeenTokens(*(array[first : first + SEEN_A_RESET] for array in seen))
            self._launch(("reset", ROWS_A_RESET, 1), pack_resets(resets, piece, max_pages=self._max_pages))
            resets = []  # once is enough

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
            stop_ids=_padded(list(request.stop_ids), MAX_STOPS, -1, np.int32),
            bias_ids=_padded(list(bias), MAX_BIAS, -1, np.int32),
            bias_values=_padded(list(bias.values()), MAX_BIAS, 0.0, np.float32),
        )  # fmt: skip
        wants = params.prompt_logprobs if request.scores_prompt and params.prompt_logprobs is not None else -1
        return RowReset(row.row, row.start, request.num_prompt_tokens, request.limit, wants, table, settings)

    # -- weights

    def update_params(self, params: Any) -> None:
        """Use other weights from the next launch on. They must have the tree, shapes and dtypes of the present ones."""
        new, old = jax.tree.structure(params), jax.tree.structure(self._params)
        if new != old:
            raise ModelError("update_params: the new parameters have another tree structure than the ones in use")
        for (path, was), leaf in zip(jax.tree_util.tree_leaves_with_path(self._params), jax.tree.leaves(params), strict=True):
            if was.shape != leaf.shape or was.dtype != leaf.dtype:
                name = jax.tree_util.keystr(path)
                raise ModelError(
                    f"update_params: {name} is {leaf.dtype}{list(leaf.shape)}, expected {was.dtype}{list(was.shape)}"
                )
        self._params = jax.tree.map(lambda was, leaf: jax.device_put(leaf, was.sharding), self._params, params)


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


def _has_penalty(request: Request) -> bool:
    params = request.params
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)


def _padded(values: list[Any], size: int, fill: float, dtype: Any) -> np.ndarray:
    assert len(values) <= size
    out = np.full(size, fill, dtype)
    out[: len(values)] = values
    return out
