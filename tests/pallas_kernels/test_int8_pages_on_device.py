"""Attention over int8 pages on a card: every configuration against the float64 oracle, and no race. Run with `-m gpu`."""

import dataclasses

import jax
import numpy as np
import pytest
from int8_pages import expected, make

from pallas_kernels.paged_attention import mosaic
from pallas_kernels.paged_attention.shapes import LLAMA_8B, QWEN2_5_1_5B, SMOLLM2_135M, Case

pytestmark = pytest.mark.gpu

ROWS = tuple((length, min(length, 1)) for length in (0, 1, 15, 16, 17, 64, 65, 300, 1000, 2047))
CASE = Case(name="", **LLAMA_8B, page_size=16, rows=ROWS, decode=True, table_pages=128, layers=2, layer=1, dtype="bfloat16")
VERIFY = dataclasses.replace(CASE, rows=((0, 0), (5, 5), (37, 1), (300, 4)), decode=False, max_queries=5, table_pages=32)


@pytest.mark.parametrize(
    ("model", "page"),
    [(LLAMA_8B, 16), (LLAMA_8B, 32), (LLAMA_8B, 64), (QWEN2_5_1_5B, 16), (QWEN2_5_1_5B, 64), (SMOLLM2_135M, 32)],
    ids=["llama-8b-16", "llama-8b-32", "llama-8b-64", "qwen2.5-1.5b-16", "qwen2.5-1.5b-64", "smollm2-32"],
)
@pytest.mark.parametrize("case", [CASE, VERIFY], ids=["decode", "verify"])
def test_every_candidate(case, model, page):
    case = dataclasses.replace(case, **model, page_size=page, table_pages=case.table_pages * 16 // page)
    args, offset = make(case)
    right = expected(case, args, offset)
    options = {"page_offset": offset, "scale": case.scale, "decode": case.decode, "max_queries": case.max_queries}
    for config in mosaic.candidates(mosaic.int8_shape_key(*args, **options)):
        run = jax.jit(lambda *args, config=config: mosaic.paged_attention(*args, config=config, **options))
        got = np.asarray(run(*args), np.float64)
        np.testing.assert_allclose(got, right, rtol=0, atol=2e-2, err_msg=str(config))
        for _ in range(20):  # no result depends on who arrives first
            np.testing.assert_array_equal(np.asarray(run(*args), np.float64), got, err_msg=str(config))
