"""The Mosaic kernel in the CPU interpreter against the float64 oracle; everything no row owns holds NaN. And its rules."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import DECODE, FEW, SMALL, VERIFY, WINDOW
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import UnsupportedShape
from pallas_kernels.paged_attention import PAGED_ATTENTION, mosaic, paged_attention, reference
from pallas_kernels.paged_attention.mosaic import Config, Shape
from pallas_kernels.paged_attention.mosaic_plan import longest_first
from pallas_kernels.paged_attention.shapes import Case, make_biases, make_inputs

MOST = dataclasses.replace(VERIFY, name="9 queries, two tiles", rows=((0, 0), (9, 9), (40, 9)), max_queries=9)
MULTI_QUERY = {**SMALL, "num_kv_heads": 1, "table_pages": 5}


def run(case, inputs, offset, config, operation=mosaic.paged_attention):
    options = {"config": config} if operation is mosaic.paged_attention else {"implementation": "mosaic"}
    floats = (jnp.asarray(x, jnp.bfloat16) for x in inputs[:3])
    with plgpu.force_gpu_interpret_mode():
        result = operation(
            *floats,
            *map(jnp.asarray, inputs[3:]),
            page_offset=jnp.int32(offset),
            scale=case.scale,
            window=jnp.int32(case.window),
            soft_cap=case.soft_cap,
            decode=case.decode,
            max_queries=case.max_queries,
            **{name: jnp.asarray(bias) for name, bias in make_biases(case).items()},
            **options,
        )
    assert result.dtype == jnp.bfloat16
    assert result.shape == inputs.q.shape
    return np.asarray(result, np.float64)


def expected(case, inputs, offset):
    return reference.paged_attention(
        *(np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in inputs[:3]),
        *inputs[3:],
        page_offset=offset,
        scale=case.scale,
        window=case.window,
        soft_cap=case.soft_cap,
        **make_biases(case),
    )


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (DECODE, Config(heads=4, keys=16, stages=2)),
        (FEW, Config(heads=2, keys=32, stages=3, splits=3)),  # a split that has no block
        (FEW, Config(heads=4, keys=16, stages=2, team=2)),
        (WINDOW, Config(heads=1, keys=64, stages=2, copier=True)),
        (VERIFY, Config(heads=1, keys=64, stages=1, splits=2, team=2)),  # members and splits without a block
        (dataclasses.replace(FEW, name="part of a page", page_size=32, head_dim=80), Config(heads=4, keys=16, stages=2)),
        (
            dataclasses.replace(FEW, name="ALiBi, 3 heads of 3", num_heads=9, num_kv_heads=3, head_dim=96, alibi=True),
            Config(heads=3, keys=64, stages=1),
        ),
        (VERIFY, Config(heads=2, keys=32, stages=2)),
        pytest.param(VERIFY, Config(heads=4, keys=16, stages=2, splits=2), marks=pytest.mark.slow, id="verify-separate"),
        pytest.param(MOST, Config(heads=4, keys=16, stages=2), marks=pytest.mark.slow, id="verify-most"),
        (
            Case(name="two tiles, both biases", **MULTI_QUERY, rows=((40, 8), (17, 1)), max_queries=8, alibi=True, bias_width=13),
            Config(heads=1, keys=64, stages=1, splits=2),
        ),
        (
            Case(
                name="queries in two parts, a query across tiles",
                **MULTI_QUERY | {"num_heads": 72},
                rows=((40, 2), (17, 1)),
                window=18,
                max_queries=2,
            ),
            Config(heads=1, keys=64, stages=1),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "-".join(map(str, value)),
)
def test_equals_the_oracle(case, config):
    inputs, offset = make_inputs(case)
    np.testing.assert_allclose(run(case, inputs, offset, config), expected(case, inputs, offset), rtol=0, atol=2e-2)


def test_all_rows_padding_gives_zeros_through_the_public_name():
    case = dataclasses.replace(FEW, rows=((0, 0),) * 3)
    inputs, offset = make_inputs(case)
    assert np.isnan(inputs.q).all()
    np.testing.assert_array_equal(run(case, inputs, offset, None, paged_attention), 0.0)


def test_pages_in_front_of_the_window_are_never_seen():
    """They may have been given to another row: here they hold NaN, or are the null page; and they share a block with the rest."""
    case = dataclasses.replace(WINDOW, rows=((70, 1), (75, 1)))
    inputs, offset = make_inputs(case)
    right = expected(case, inputs, offset)
    gone = inputs.page_table[0, : (70 - 20) // 16] + offset
    inputs.k_cache[gone] = inputs.v_cache[gone] = np.nan
    inputs.page_table[1, : (75 - 20) // 16] = 0
    result = run(case, inputs, offset, Config(heads=2, keys=64, stages=2))
    np.testing.assert_allclose(result, right, rtol=0, atol=2e-2)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of the interpreter, about scores that are masked
@pytest.mark.parametrize("poison", [np.nan, np.inf, pytest.param(-np.inf, marks=pytest.mark.slow)])
def test_what_no_row_owns_never_reaches_the_output(poison):
    """Bit for bit the result over a clean pool."""
    config = Config(heads=4, keys=32, stages=2)
    clean, offset = make_inputs(FEW, poison=0.0)
    dirty, _ = make_inputs(FEW, poison=poison)
    np.testing.assert_array_equal(run(FEW, dirty, offset, config), run(FEW, clean, offset, config))


def test_nan_of_one_row_stays_in_that_row():
    config = Config(heads=4, keys=16, stages=2)
    inputs, offset = make_inputs(FEW)
    right = run(FEW, inputs, offset, config)
    page = inputs.page_table[0, 0] + offset
    inputs.v_cache[page, :, 3] = inputs.k_cache[page, :, 7] = np.nan
    result = run(FEW, inputs, offset, config)
    assert np.isnan(result[0]).all()
    np.testing.assert_array_equal(result[1:], right[1:])


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (FEW, Config(heads=4, keys=16, stages=2)),
        (FEW, Config(heads=2, keys=32, stages=2, splits=2)),
        (VERIFY, Config(heads=1, keys=64, stages=1)),
    ],
    ids=["decode", "splits", "verify"],
)
def test_the_order_of_the_rows_changes_nothing(case, config, monkeypatch):
    """Bit for bit what it is when they begin as they lie in the batch."""
    inputs, offset = make_inputs(case)
    as_they_lie = run(case, inputs, offset, config)
    monkeypatch.setattr(mosaic, "CTAS", 1)
    heads = case.num_heads, case.num_kv_heads, case.head_dim
    shape = Shape(len(inputs.seq_lens), case.max_queries or 1, *heads, case.page_size, 80, 0)
    assert mosaic._plan(shape, config, None, by_row=case.decode).longest_first
    np.testing.assert_array_equal(run(case, inputs, offset, config), as_they_lie)


def test_the_longest_rows_are_first():
    lengths = np.random.default_rng().integers(0, 20, 61).astype(np.int32)
    np.testing.assert_array_equal(longest_first(jnp.asarray(lengths)), np.argsort(-lengths, kind="stable"))


def test_rows_are_ordered_only_where_not_all_of_them_run_at_once():
    for rows, ordered in ((8, False), (33, False), (34, True), (256, True)):
        plan = mosaic._plan(Shape(rows, 1, 32, 8, 128, 16, 2048, 0), Config(heads=1, keys=64, stages=3), None, by_row=True)
        assert plan.longest_first is ordered


@pytest.mark.slow
def test_the_splits_of_a_row_do_not_depend_on_other_rows():
    """Bit for bit: a row alone and in a batch, with a page table of the same width."""
    config = Config(heads=4, keys=16, stages=2, splits=2)
    inputs, offset = make_inputs(FEW)
    together = run(FEW, inputs, offset, config)
    alone = inputs._replace(
        q=inputs.q[1:2],
        page_table=inputs.page_table[1:2],
        seq_lens=inputs.seq_lens[1:2],
        query_starts=np.array([0, 1], np.int32),
    )
    np.testing.assert_array_equal(run(FEW, alone, offset, config)[0], together[1])


def arguments(dtype=jnp.bfloat16, q=(4, 8, 64), cache=(20, 4, 16, 64), cache_dtype=None, rows=4):
    pool = jnp.zeros(cache, cache_dtype or dtype)
    table, lengths, starts = jnp.zeros((rows, 5), jnp.int32), jnp.zeros(rows, jnp.int32), jnp.zeros(rows + 1, jnp.int32)
    return jnp.zeros(q, dtype), pool, pool, table, lengths, starts


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"dtype": jnp.float32}, {}, "bfloat16 only, got float32 queries"),
        ({"cache_dtype": jnp.float32}, {}, "bfloat16 only, got bfloat16 queries and float32 caches"),
        ({"q": (4, 8, 72), "cache": (20, 4, 16, 72)}, {}, "head dims 64, 80, .*, got 72"),
        ({"cache": (20, 4, 8, 64)}, {}, "pages of 16, 32, 64 tokens, got 8"),
        ({"q": (4, 129, 64), "cache": (20, 1, 16, 64)}, {}, "at most 128 query heads a kv head, got 129"),
        ({}, {"decode": False}, "at most 9 queries, got no limit"),
        ({}, {"decode": False, "max_queries": 10}, "at most 9 queries, got 10"),
        ({}, {"config": Config(3, 64, 1)}, "3 heads a copy do not divide 4 kv heads"),
        ({}, {"config": Config(2, 16, 1)}, "blocks of 64, 128, 192 or 256 rows, got 32"),
        ({}, {"config": Config(2, 24, 1)}, "whole pages of 16 tokens or of a part of one, got 24 keys"),
        ({}, {"config": Config(4, 16, 99)}, "bytes of shared memory, at most 231424"),
        ({}, {"config": Config(4, 16, 2, team=2, copier=True)}, "a team of 2 takes one query tile, no copier"),
        ({}, {"config": Config(4, 16, 2), "relative_bias": jnp.zeros((8, 9))}, "a relative bias takes one head a copy"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(changes, options, message):
    with pytest.raises(UnsupportedShape, match=message):
        mosaic.paged_attention(*arguments(**changes), page_offset=0, scale=1.0, **{"decode": True} | options)


def test_automatic_choice_on_a_cpu_is_the_reference():
    """Silently, and also where the kernel could serve: nothing would run here."""
    assert list(PAGED_ATTENTION.implementations) == ["xla", "mosaic", "mosaic_int8", "flash", "apart"]
    result = paged_attention(*arguments(), page_offset=0, scale=1.0, decode=True)
    np.testing.assert_array_equal(np.asarray(result, np.float32), 0.0)


def test_the_key_is_the_shape():
    q, k, v, table, lengths, starts = arguments()
    key = mosaic.shape_key(q, k, v, table, lengths, starts, page_offset=0, scale=1.0, decode=False, max_queries=3)
    assert key == {
        "rows": 4,
        "queries": 3,
        "heads": 8,
        "kv_heads": 4,
        "head_dim": 64,
        "page": 16,
        "context": 80,
        "bias": 0,
    }


SHAPES = [
    Shape(rows, queries, heads, kv_heads, head_dim, page, context, bias)
    for heads, kv_heads, head_dim in (
        (32, 8, 128),
        (12, 2, 128),
        (9, 3, 64),
        (32, 32, 80),
        (32, 32, 96),
        (16, 8, 256),
        (71, 1, 64),
    )
    for rows, queries, page, context, bias in ((1, 1, 16, 8192, 0), (32, 1, 64, 2048, 0), (8, 8, 32, 512, 0), (256, 1, 16, 64, 1))
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_candidates_are_servable_different_and_begin_with_the_default(shape):
    found = mosaic.candidates(shape._asdict())
    assert found[0] == mosaic.default_config(shape)
    assert len(set(found)) == len(found) > 1
    assert [config for config in found if mosaic._reason(shape, config)] == []


def test_two_ctas_share_a_multiprocessor_at_the_shapes_that_count():
    for page in (16, 32, 64):
        for rows in (8, 32, 128):
            shape = Shape(rows, 1, 32, 8, 128, page, 2048, 0)
            config = mosaic.default_config(shape)
            plan = mosaic._plan(shape, config, None, by_row=True)
            assert plan.shared_bytes <= mosaic.HALF_SHARED_BYTES
            assert rows * plan.groups * plan.splits > 132
