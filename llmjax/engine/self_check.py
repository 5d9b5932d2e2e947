"""The checks between warm-up and ready: each kernel by itself, then real weights, the real programs, a few tokens.

Wrong numbers refuse to serve.
"""

from __future__ import annotations

import logging

import jax
import numpy as np

from llmjax.engine.compile_programs import draft_lengths
from llmjax.engine.config import ResolvedConfig
from llmjax.engine.runner import ModelRunner
from llmjax.errors import BackendError, NonFiniteError
from llmjax.model.batch import pack_sequences
from llmjax.model.kv_cache import init_cache
from llmjax.model.registry import DecoderConfig, Model, is_shared_decoder
from llmjax.sampling_params import SamplingParams
from llmjax.scheduling.request import Request, ScheduledBatch, ScheduledRow
from pallas_kernels import smoke

log = logging.getLogger(__name__)

PROBE_TOKENS = 8


def check_kernels(*, int8: bool) -> None:
    """Compare the kernels this device may choose, with `int8` those for int8 weights and pages too, with their references; raise
    `BackendError` for the first that is wrong."""
    try:
        compared = smoke.check(smoke.PROBES if int8 else smoke.FLOAT_PROBES)
    except smoke.WrongNumbers as error:
        device = jax.devices()[0].device_kind
        raise BackendError(
            f"{error} on {device}: its driver, CUDA and jax {jax.__version__} do not go together; use other versions of them"
        ) from error
    if compared:
        log.info("kernels compared with their references: %s", ", ".join(compared))


def check_finite(runner: ModelRunner, model: Model, config: DecoderConfig, engine_config: ResolvedConfig) -> None:
    """Compute a short prompt through `runner`; raise `NonFiniteError` naming the first layer that overflows.

    `check_kernels` belongs before it, so that a wrong kernel is not blamed on the weights.
    The probe's K and V lie on page 1 afterwards and are overwritten by the page's first owner.
    """
    length = min(PROBE_TOKENS, engine_config.max_context - 1, runner.token_buckets[-1], engine_config.page_size)
    ids = [int(i) for i in np.linspace(0, config.num_tokens - 1, length)]
    request = Request("self-check", ids, SamplingParams(max_tokens=1, temperature=0.0), seed=0, limit=1, pages=[1])
    row = ScheduledRow(request, 0, 0, 0, length, ids, samples=1, is_new=True, new_pages=[(0, 1)])
    drafts = 0 if engine_config.speculative is None else draft_lengths(engine_config)[0]
    drafts = max(0, min(drafts, engine_config.max_context - length - 1, engine_config.page_size - length - 1))
    if drafts:
        request.limit = 2 + drafts  # a token, its drafts, and one behind them
    output = runner.dispatch(ScheduledBatch(0, "extend", 1, [row])).result()
    if bool(output.finite.all()):
        if drafts:
            _check_draft(runner, engine_config, request, length, drafts)
        return
    advice = "use bfloat16 or float32" if config.dtype == "float16" else "check the weights"
    where = _first_bad_layer(runner, config, ids, engine_config.page_size) if is_shared_decoder(model) else "the model"
    raise NonFiniteError(f"{where} gives NaN or infinite values in {config.dtype} on a plain prompt; {advice}")


def _check_draft(runner: ModelRunner, engine_config: ResolvedConfig, request: Request, length: int, drafts: int) -> None:
    """Draft behind the prompt. Logits that are not finite give no drafts; prompt lookup may find none either way."""
    assert engine_config.speculative is not None
    row = ScheduledRow(request, 0, 0, length, drafts + 1, (), samples=drafts + 1, drafts=drafts)
    batch = ScheduledBatch(1, "speculate", 1, [row], draft_length=draft_lengths(engine_config)[0])
    output = runner.dispatch(batch).result()
    assert output.proposed is not None
    if engine_config.speculative.method != "ngram" and int(output.proposed[0]) < drafts:
        what = {"draft": "the draft model", "truncated": "the truncated model"}[engine_config.speculative.method]
        raise NonFiniteError(f"{what} gives NaN or infinite values on a plain prompt; use another one, or set method to 'ngram'")


def _first_bad_layer(runner: ModelRunner, config: DecoderConfig, ids: list[int], page_size: int) -> str:
    from llmjax.model import transformer

    batch, pages = pack_sequences([ids], page_size=page_size)
    cache = init_cache(config, num_pages=pages, page_size=page_size)
    check = jax.jit(transformer.layer_finiteness, static_argnames="config")
    finite = np.asarray(check(runner.params, batch, cache, config=config))
    return "the output head" if finite.all() else f"layer {int(np.argmin(finite))}"
