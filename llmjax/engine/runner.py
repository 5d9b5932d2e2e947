"""`ModelRunner`: the one place where host and device meet. `ScheduledBatch` in, `StepOutput` out.

It owns the parameters, the KV cache and the `DeviceState`, and the compiled programs. It decides nothing: which rows run is the
scheduler's, what they mean is the engine's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.engine.compile_counter import CompileCounter
from llmjax.engine.compile_programs import Key, catch_up_key
from llmjax.engine.config import ResolvedConfig
from llmjax.engine.launch_pack import LaunchPack, padded
from llmjax.engine.prompt_scores import Unscored
from llmjax.engine.row_masks import RowMasks
from llmjax.engine.sample import TokenScores
from llmjax.engine.speculative import ACCEPTED, DRAFTED
from llmjax.engine.state import ROWS_A_RESET, DeviceState, init_state, pack_masks
from llmjax.engine.step import StepTokens
from llmjax.engine.token_masks import num_mask_words
from llmjax.errors import ModelError
from llmjax.model.kv_cache import NULL_PAGE, PAGES_A_WIPE, KVCache, init_cache, with_key_channels
from llmjax.model.registry import DecoderConfig
from llmjax.scheduling.buckets import pick
from llmjax.scheduling.request import PromptScores, ScheduledBatch, StepOutput, TopLogprobs
from llmjax.scheduling.speculation import LaunchSeconds

MEASURED = 4
"""Launches in a row that a program is measured by, beyond the first."""


def on_device(params: Any) -> Any:
    """The same parameters with host arrays put on the default device: they would else be sent with every launch."""
    return jax.tree.map(jnp.asarray, params)


class PendingStep:
    """A launch of `program` that was dispatched; `result()` waits for it and brings its small outputs to the host. `scores` are
    computed behind it, and None where nobody wants them."""

    def __init__(self, batch: ScheduledBatch, program: Key, tokens: StepTokens, scores: TokenScores | None) -> None:
        self.batch = batch
        self.program = program
        self._tokens, self._scores = tokens, scores
        self._wants_top = any(row.request.params.logprobs for row in batch.rows)
        tokens.summary.copy_to_host_async()
        if self._wants_top:
            tokens.top_ids.copy_to_host_async()
            tokens.top_logprobs.copy_to_host_async()

    @property
    def ended(self) -> bool:
        """Whether the device is done with it."""
        last = self._tokens.summary if self._scores is None else self._scores.top_logprobs
        return bool(last.is_ready())

    def result(self) -> StepOutput:
        """The launch's outputs as numpy, cut to the rows that were scheduled."""
        rows = len(self.batch.rows)
        summary = np.asarray(self._tokens.summary)[:, :rows]
        flags = summary[..., 3]
        top = scores = proposed = accepted = None
        if self.batch.kind == "speculate":
            proposed, accepted = ((flags & bit != 0).sum(axis=0, dtype=np.int32) for bit in (DRAFTED, ACCEPTED))
        if self._wants_top:
            top = TopLogprobs(np.asarray(self._tokens.top_ids)[:, :rows], np.asarray(self._tokens.top_logprobs)[:, :rows])
        if self._scores is not None:
            used = self.batch.num_tokens
            scores = PromptScores(*(np.asarray(a)[:used] for a in self._scores))
        return StepOutput(
            batch=self.batch,
            tokens=summary[..., 0],
            logprobs=np.ascontiguousarray(summary[..., 1]).view(np.float32),
            ranks=summary[..., 2],
            finite=(flags & 1).astype(bool),
            top=top,
            prompt_scores=scores,
            proposed=proposed,
            accepted=accepted,
        )


class ModelRunner:
    """Launches the step programs of one model.

    Args:
        config, params: what to run; `params` are held, not copied; see `on_device`.
        engine_config: sizes, as `EngineConfig.resolved` gives them.
        num_pages: pages a layer, the null page included.
        executables: the compiled programs (`compile_programs`) for just these sizes.
        draft_config, draft_params: of the draft model, if there is one.
        key_channels: of an int8 cache, if others than ones; they stay as they are when the parameters are updated.

    Attributes:
        launch_seconds: what programs take on padding rows; measured by `warm_up` where there is speculation.

    Buffers: the runner owns caches and state; every launch donates them and takes the returned ones.
    """

    def __init__(
        self,
        config: DecoderConfig,
        params: Any,
        engine_config: ResolvedConfig,
        *,
        num_pages: int,
        executables: Mapping[Key, Any],
        draft_config: DecoderConfig | None = None,
        draft_params: Any = None,
        key_channels: jax.Array | None = None,
    ) -> None:
        self._params, self._draft_params = params, draft_params
        self._measures = engine_config.speculative is not None
        self._speculate_row_buckets = engine_config.speculate_row_buckets
        self._catch_up = catch_up_key(engine_config)
        self.launch_seconds = LaunchSeconds({}, {})
        self._pack = LaunchPack(engine_config)
        self.row_buckets, self.token_buckets = engine_config.row_buckets, engine_config.token_buckets
        self.num_pages = num_pages
        page_size = engine_config.page_size
        cache = init_cache(config, num_pages=num_pages, page_size=page_size, dtype=engine_config.kv_cache_dtype)
        self._cache: KVCache = cache if key_channels is None else with_key_channels(cache, key_channels)
        self._draft_cache: KVCache | None = None
        if draft_config is not None:
            self._draft_cache = init_cache(draft_config, num_pages=num_pages, page_size=page_size)
        self._state = init_state(
            max_sequences=engine_config.max_sequences,
            max_pages=engine_config.max_pages,
            vocab_size=config.vocab_size,
            history_length=engine_config.history_length,
            mask_places=engine_config.mask_places,
        )
        self._compiles_after_ready = 0
        self._executables = executables
        # On the device, so that a reset sends no empty masks and a mask no empty resets.
        self._no_masks = jnp.asarray(pack_masks([], [], num_words=num_mask_words(config.vocab_size)))
        self._no_resets = jnp.asarray(self._pack.padding("reset", ROWS_A_RESET, 1))

    @property
    def compiles_after_ready(self) -> int:
        """Programs XLA compiled during a launch since `warm_up` ended. Stays 0: that is what the programs are for."""
        return self._compiles_after_ready

    @property
    def params(self) -> Any:
        """The parameters in use."""
        return self._params

    @property
    def arrays(self) -> tuple[Any, Any, DeviceState]:
        """What is held on the device: parameters, cache and state; with a draft model pairs of the first two, the target's and
        its own. The next launch donates the latter two: look, do not keep."""
        if self._draft_cache is None:
            return self._params, self._cache, self._state
        return (self._params, self._draft_params), (self._cache, self._draft_cache), self._state

    # -- programs

    def wait(self) -> None:
        """Until parameters, cache and state are there: allocating is asynchronous, and so is its failing."""
        jax.block_until_ready(self.arrays)

    def warm_up(self) -> None:
        """Run every program once on padding rows, so that serving loads and allocates nothing. With speculation also measure
        those that there is a choice of."""
        for key in self._executables:
            if key[0] == "score":
                continue  # runs behind the extend program that it belongs to
            _, unscored = self._launch(key, self._pack.padding(*key))
            if unscored is not None:
                jax.block_until_ready(self._score(unscored))
        jax.block_until_ready(self.arrays)
        if self._measures:
            seconds = {key: self._seconds(key) for key in self._executables if key[0] in ("decode", "speculate")}
            self.launch_seconds = LaunchSeconds(
                plain={rows: took for (kind, rows, steps), took in seconds.items() if kind == "decode" and steps == 1},
                speculate={(rows, drafts): took for (kind, rows, drafts), took in seconds.items() if kind == "speculate"},
            )
        self._compiles_after_ready = 0

    def _seconds(self, key: Key) -> float:
        """Seconds of a launch without any row among others like it: what more launches take than one.

        Of one alone the host's part counts too, which serving hides behind the launch before: up to as much as the device's.
        """
        one, several = (min(self._seconds_of(key, count) for _ in range(2)) for count in (1, 1 + MEASURED))
        return max(several - one, several / (2 + 2 * MEASURED)) / MEASURED

    def _seconds_of(self, key: Key, count: int) -> float:
        """Seconds from the first of `count` launches in a row until the last has ended."""
        packed, start = self._pack.padding(*key), time.perf_counter()
        for _ in range(count):
            self._launch(key, packed)
        jax.block_until_ready(self.arrays[1:])
        return time.perf_counter() - start

    def _launch(self, key: Key, packed: Any, masks: Any = None) -> tuple[StepTokens | None, Unscored | None]:
        executable = self._executables[key]
        compiled = CompileCounter()
        tokens = unscored = None
        if key[0] == "reset":
            self._state = executable(self._state, packed, self._no_masks if masks is None else masks)
        elif key[0] == "catch_up":
            self._draft_cache = executable(self._draft_params, self._state, packed, self._draft_cache)
        elif key[0] == "speculate":
            self._state, tokens, self._cache, self._draft_cache = executable(
                self._params, self._draft_params, self._state, packed, self._cache, self._draft_cache
            )
        elif key[0] == "decode":
            self._state, tokens, self._cache = executable(self._params, self._state, packed, self._cache)
        elif self._draft_cache is not None:
            if key[0] == "wipe":
                self._cache, self._draft_cache = executable(self._cache, self._draft_cache, packed)
            else:
                self._state, tokens, unscored, self._cache, self._draft_cache = executable(
                    self._params, self._draft_params, self._state, packed, self._cache, self._draft_cache
                )
        elif key[0] == "wipe":
            self._cache = executable(self._cache, packed)
        else:
            self._state, tokens, unscored, self._cache = executable(self._params, self._state, packed, self._cache)
        self._compiles_after_ready += compiled.count
        return tokens, unscored

    def _score(self, unscored: Unscored) -> TokenScores:
        executable = self._executables[("score", unscored.targets.shape[0], 1)]
        compiled = CompileCounter()
        scores: TokenScores = executable(self._params, *unscored)
        self._compiles_after_ready += compiled.count
        return scores

    # -- launches

    def dispatch(self, batch: ScheduledBatch, masks: Sequence[RowMasks] = ()) -> PendingStep:
        """Launch a batch. Returns at once; launches run in the order of dispatch. `masks` are of the rows that sample only some
        tokens, with their drafts."""
        for first in range(0, len(batch.dirty_pages), PAGES_A_WIPE):
            pages = list(batch.dirty_pages[first : first + PAGES_A_WIPE])
            self._launch(("wipe", PAGES_A_WIPE, 1), padded(pages, PAGES_A_WIPE, NULL_PAGE, np.int32))
        new = [row for row in batch.rows if row.is_new]
        for first in range(0, len(new), ROWS_A_RESET):
            for packed in self._pack.resets(new[first : first + ROWS_A_RESET]):
                self._launch(("reset", ROWS_A_RESET, 1), packed)
        for drafts, allowed in self._pack.masks(masks):
            self._launch(("reset", ROWS_A_RESET, 1), self._no_resets if drafts is None else drafts, allowed)
        program: Key
        if batch.kind == "decode":
            program = ("decode", pick(self.row_buckets, len(batch.rows)), batch.num_steps)
            packed = self._pack.decode(batch, program[1], batch.num_steps)
        elif batch.kind == "speculate":
            for pieces in self._pack.holes(batch.rows, self._catch_up[1]):
                self._launch(self._catch_up, self._pack.catch_up(pieces, self._catch_up[1]))
            program = ("speculate", pick(self._speculate_row_buckets, len(batch.rows)), batch.draft_length)
            packed = self._pack.speculate(batch, program[1], masks)
        else:
            program = ("extend", pick(self.token_buckets, batch.num_tokens), 1)
            packed = self._pack.extend(batch, program[1])
        tokens, unscored = self._launch(program, packed)
        assert tokens is not None
        wants = unscored is not None and any(row.wants_prompt_logprobs for row in batch.rows)
        # Nobody keeps the hidden states: they are as large as many rows' state.
        return PendingStep(batch, program, tokens, self._score(unscored) if wants else None)

    def set_draft_temperature(self, temperature: float) -> None:
        """Draft at this temperature, relative to the requests', from the next launch on."""
        self._pack.draft_temperature = temperature

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
