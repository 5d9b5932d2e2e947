"""The Mosaic kernel in the CPU interpreter against the float64 formulas; everything no row owns holds NaN. And its rules."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import UnsupportedShape
from pallas_kernels.flash_attention import FLASH_ATTENTION, flash_attention, mosaic, reference
from pallas_kernels.flash_attention.mosaic import Config, Shape
from pallas_kernels.flash_attention.shapes import Case, make_biases, make_inputs
from pallas_kernels.flash_attention.tiles import cut
from pallas_kernels.flash_attention.xla import Biases, Rows
from pallas_kernels.paged_attention import PAGED_ATTENTION, paged_attention
from pallas_kernels.paged_attention import reference as paged_reference
from pallas_kernels.paged_attention import shapes as paged_shapes

SMALL = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 64}
RAGGED = Case(
    name="ragged, starts that are no multiples of 8, tiles cut short at both ends",
    **SMALL,
    rows=((37, 37), (0, 0), (75, 3), (1, 1)),
    padded_tokens=3,
    padded_keys=6,
)
WINDOW = dataclasses.replace(RAGGED, name="window, soft cap", rows=((13, 3), (140, 15)), window=20, soft_cap=2.0, padded_keys=0)
BIASES = dataclasses.replace(
    RAGGED, name="both biases", num_heads=2, num_kv_heads=2, rows=((5, 5), (130, 9)), alibi=True, bias_width=21
)
BOTH_WAYS = dataclasses.replace(RAGGED, name="both directions", rows=((70, 7), (30, 30)), causal=False, window=90)


def run(case, inputs, config):
    biases = {name: jnp.asarray(x) for name, x in make_biases(case).items()}
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in inputs[:3]]
    rows = Rows(jnp.asarray(inputs.query_starts), jnp.asarray(inputs.key_starts), jnp.int32(case.window))
    with plgpu.force_gpu_interpret_mode():
        out, lse = mosaic.flash_attention(
            *arrays,
            Biases(biases.get("alibi_slopes"), biases.get("relative_bias"), None),
            rows,
            causal=case.causal,
            scale=case.scale,
            soft_cap=case.soft_cap,
            return_lse=True,
            config=config,
        )
    assert out.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    return np.asarray(out, np.float64), np.asarray(lse, np.float64)


def rounded(inputs):
    return [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in inputs[:3]]


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (RAGGED, Config(keys=64, stages=2, q_stages=2, heads=4)),
        (WINDOW, Config(keys=64, stages=3, q_stages=1, heads=2)),
        (BIASES, Config(keys=64, stages=2, q_stages=2, heads=1)),
        (BOTH_WAYS, Config(keys=64, stages=2, q_stages=1, heads=4)),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "-".join(map(str, value)),
)
def test_equals_the_dense_formula(case, config):
    inputs = make_inputs(case, seed=np.random.SeedSequence().entropy)
    right = reference.flash_attention(*rounded(inputs), *inputs[3:], **case.options, **make_biases(case))
    for one, other in zip(run(case, inputs, config), right, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-2)


PAGED = paged_shapes.Case(
    name="ragged: prefill, decode, chunk on a prefix, padding",
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    page_size=16,
    rows=((35, 1), (20, 20), (0, 0), (90, 10)),
    padded_tokens=3,
    table_pages=7,
    layers=2,
    layer=1,
)


def run_paged(case, inputs, offset, **options):
    floats = (jnp.asarray(x, jnp.bfloat16) for x in inputs[:3])
    operation = mosaic.paged_attention if "config" in options else paged_attention
    with plgpu.force_gpu_interpret_mode():
        result = operation(
            *floats,
            *map(jnp.asarray, inputs[3:]),
            page_offset=jnp.int32(offset),
            scale=case.scale,
            window=jnp.int32(case.window),
            soft_cap=case.soft_cap,
            decode=False,
            **{name: jnp.asarray(bias) for name, bias in paged_shapes.make_biases(case).items()},
            **options,
        )
    assert result.dtype == jnp.bfloat16
    assert result.shape == inputs.q.shape
    return np.asarray(result, np.float64)


def expected_paged(case, inputs, offset):
    return paged_reference.paged_attention(
        *rounded(inputs),
        *inputs[3:],
        page_offset=offset,
        scale=case.scale,
        window=case.window,
        soft_cap=case.soft_cap,
        **paged_shapes.make_biases(case),
    )


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (PAGED, Config(keys=64, stages=2, q_stages=2, heads=2)),
        (
            dataclasses.replace(PAGED, name="window, pages of 64, head dim 80", page_size=64, head_dim=80, window=30),
            Config(keys=64, stages=2, q_stages=1, heads=1),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, paged_shapes.Case) else "-".join(map(str, value)),
)
def test_paged_equals_the_oracle(case, config):
    inputs, offset = paged_shapes.make_inputs(case, seed=int(np.random.SeedSequence().generate_state(1)[0]))
    got = run_paged(case, inputs, offset, config=config)
    np.testing.assert_allclose(got, expected_paged(case, inputs, offset), rtol=0, atol=2e-2)


def test_pages_in_front_of_the_window_are_never_seen():
    """They may have been given to another row: here they hold NaN; and they share a block with the rest."""
    case = dataclasses.replace(PAGED, rows=((70, 3),), window=20)
    inputs, offset = paged_shapes.make_inputs(case)
    right = expected_paged(case, inputs, offset)
    gone = inputs.page_table[0, : (70 - 3 - 19) // 16] + offset
    inputs.k_cache[gone] = inputs.v_cache[gone] = np.nan
    got = run_paged(case, inputs, offset, implementation="flash")
    np.testing.assert_allclose(got, right, rtol=0, atol=2e-2)
