"""Rows of one query computed apart: each row as the kernel it goes to computes it, whatever stands beside it."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import UnsupportedShape
from pallas_kernels.flash_attention.mosaic import Config
from pallas_kernels.paged_attention import PAGED_ATTENTION, apart, reference, shapes

# Of the interpreter's NumPy, about scores that are masked.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")

MIXED = shapes.Case(
    name="rows of one query before, between and behind others",
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    page_size=16,
    rows=((35, 1), (20, 20), (0, 0), (1, 1), (90, 10), (64, 1)),
    padded_tokens=3,
    table_pages=7,
    layers=2,
    layer=1,
)
CASES = [
    MIXED,
    dataclasses.replace(MIXED, name="only rows of one query", rows=((1, 1), (16, 1), (17, 1))),
    dataclasses.replace(MIXED, name="none", rows=((35, 2), (0, 0), (20, 20))),
    dataclasses.replace(MIXED, name="a window, a soft cap", window=20, soft_cap=30.0),
    dataclasses.replace(MIXED, name="slopes", alibi=True),
]


def run(function, case, inputs, offset, **options):
    floats = (jnp.asarray(x, jnp.bfloat16) for x in inputs[:3])
    given = {"scale": case.scale, "window": jnp.int32(case.window), "soft_cap": case.soft_cap, "decode": False}
    biases = {name: jnp.asarray(bias) for name, bias in shapes.make_biases(case).items()}
    result = function(*floats, *map(jnp.asarray, inputs[3:]), page_offset=jnp.int32(offset), **given | biases | options)
    assert (result.dtype, result.shape) == (jnp.bfloat16, inputs.q.shape)
    return np.asarray(result, np.float64)


def expected(case, inputs, offset):
    floats = (np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in inputs[:3])
    options = {"scale": case.scale, "window": case.window, "soft_cap": case.soft_cap}
    return reference.paged_attention(*floats, *inputs[3:], page_offset=offset, **options, **shapes.make_biases(case))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_row_is_computed_once(case):
    """By the kernel for many queries here, and the reference for one."""
    inputs, offset = shapes.make_inputs(case, seed=int(np.random.SeedSequence().generate_state(1)[0]))
    with plgpu.force_gpu_interpret_mode():
        got = run(PAGED_ATTENTION, case, inputs, offset, implementation="apart")
    np.testing.assert_allclose(got, expected(case, inputs, offset), rtol=0, atol=2e-2)


def test_a_row_of_one_query_is_bit_for_bit_what_decoding_gives():
    """With both kernels, in NaN: so a token does not depend on whether a prompt stood beside it."""
    inputs, offset = shapes.make_inputs(MIXED)
    single = [row for row, (_, queries) in enumerate(MIXED.rows) if queries == 1]
    tokens = inputs.query_starts[single]
    attend = functools.partial(PAGED_ATTENTION, implementation="mosaic")
    with plgpu.force_gpu_interpret_mode():
        got = run(apart.via(attend), MIXED, inputs, offset)
        q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (inputs.q[tokens], inputs.k_cache, inputs.v_cache))
        # As many rows as there: the kernel's cut depends on it.
        missing = len(inputs.seq_lens) - len(single)
        q = jnp.pad(q, ((0, missing), (0, 0), (0, 0)))
        table, lengths = (np.concatenate([x[single], np.zeros_like(x[:missing])]) for x in (inputs.page_table, inputs.seq_lens))
        starts = jnp.arange(len(lengths) + 1, dtype=jnp.int32)
        alone = attend(
            q,
            k,
            v,
            jnp.asarray(table),
            jnp.asarray(lengths),
            starts,
            page_offset=jnp.int32(offset),
            scale=MIXED.scale,
            decode=True,
        )
    np.testing.assert_array_equal(got[tokens], np.asarray(alone, np.float64)[: len(single)])
    np.testing.assert_allclose(got, expected(MIXED, inputs, offset), rtol=0, atol=2e-2)


def test_what_the_kernel_for_many_queries_cannot_serve_is_refused():
    inputs, offset = shapes.make_inputs(MIXED)
    for options, message in (
        ({"decode": True}, "few queries a row"),
        ({"config": Config(32, 2, 1, 1)}, "blocks of 64 or 128 keys"),
    ):
        with pytest.raises(UnsupportedShape, match=message):
            run(PAGED_ATTENTION.implementations["apart"].function, MIXED, inputs, offset, **options)
