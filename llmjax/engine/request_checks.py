"""What a request must be before it is queued. Each refusal is one line that names the field and says what to do.

Owns the limits that do not depend on what else runs. Must not know the queue.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from llmjax.engine.sample import MAX_STOPS
from llmjax.errors import ContextLengthError, RequestError
from llmjax.sampling_params import SamplingParams


def token_ids(prompt: Any) -> list[int]:
    """A prompt of token ids (list, tuple, or array of NumPy or JAX) as a list. Raises `RequestError` for anything else."""
    as_list = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(as_list, list | tuple):
        raise RequestError(f"a prompt is a text or a list of token ids, got {prompt!r:.60}", "prompt")
    return [_token_id(item, index) for index, item in enumerate(as_list)]


def _token_id(item: Any, index: int) -> int:
    if not isinstance(item, bool):
        try:
            return operator.index(item)
        except TypeError:
            pass
    raise RequestError(f"prompt[{index}] is {item!r:.60}: a token id is a whole number", "prompt")


def output_limit(ids: Sequence[int], params: SamplingParams, max_context: int) -> int:
    """Output tokens a request may have: what it asks for, as far as the context holds it.

    Raises `RequestError` for an empty prompt, `ContextLengthError` for one that leaves no room.
    """
    if not ids:
        raise RequestError(
            "the prompt is empty and the tokenizer adds no beginning-of-sequence token: give at least one token", "prompt"
        )
    left = max_context - len(ids)
    needed = 0 if params.max_tokens == 0 else 1
    if left < needed:
        raise ContextLengthError(
            f"the prompt has {len(ids)} tokens; with max_context {max_context} at most "
            f"{max_context - needed} fit: shorten it, or raise max_context",
            "prompt",
        )
    return left if params.max_tokens is None else min(left, params.max_tokens)


def check_ids(ids: Sequence[int], num_tokens: int) -> None:
    """Raise `RequestError` for an id that a vocabulary of `num_tokens` does not have."""
    for index, item in enumerate(ids):
        if not 0 <= item < num_tokens:
            raise RequestError(f"prompt[{index}] is {item}: the model's token ids are 0 to {num_tokens - 1}", "prompt")


def check_params(params: SamplingParams, num_tokens: int, eos_ids: Sequence[int], *, has_tokenizer: bool) -> None:
    """Raise `RequestError` for ids the vocabulary does not have, more stop ids than fit, or stop strings without a tokenizer."""
    for name, ids in (("stop_token_ids", params.stop_ids), ("logit_bias", tuple(params.logit_bias or ()))):
        for item in ids:
            if item >= num_tokens:
                raise RequestError(f"{name} names token id {item}, but the vocabulary has ids 0 to {num_tokens - 1}", name)
    stops = len({*eos_ids, *params.stop_ids})
    if stops > MAX_STOPS:
        raise RequestError(
            f"stop_token_ids and the model's end-of-sequence ids are {stops} ids, at most {MAX_STOPS} fit",
            "stop_token_ids",
        )
    if params.stop_strings and not has_tokenizer:
        raise RequestError("stop strings need a tokenizer, and this engine has none: use stop_token_ids", "stop")
