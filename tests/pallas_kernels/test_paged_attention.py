"""Paged attention against a float64 oracle; everything no row owns holds NaN (`shapes.make_inputs`)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import paged_attention, reference, xla
from pallas_kernels.paged_attention.shapes import (
    DECODE,
    EXTEND,
    RAGGED_DECODE,
    RAGGED_EXTEND,
    VERIFY,
    Case,
    make_biases,
    make_inputs,
)

TOLERANCE = {"float32": 3e-6, "bfloat16": 2e-2, "float16": 3e-3}


def run(case, inputs, offset, **changes):
    q, k_cache, v_cache, *batch = inputs
    arrays = [jnp.asarray(x, case.dtype) for x in (q, k_cache, v_cache)] + [jnp.asarray(x) for x in batch]
    options = {
        "scale": case.scale,
        "window": case.window,
        "soft_cap": case.soft_cap,
        "decode": case.decode,
        "max_queries": case.max_queries,
        **{name: jnp.asarray(bias) for name, bias in make_biases(case).items()},
        **changes,
    }
    result = paged_attention(*arrays, page_offset=offset, **options)
    assert result.dtype == case.dtype
    assert result.shape == q.shape
    return np.asarray(result, np.float64)


def expected(case, inputs, offset, window=None):
    rounded = [np.asarray(jnp.asarray(x, case.dtype), np.float64) for x in inputs[:3]]
    window = case.window if window is None else window
    return reference.paged_attention(
        *rounded,
        *inputs[3:],
        page_offset=offset,
        scale=case.scale,
        window=window,
        soft_cap=case.soft_cap,
        **make_biases(case),
    )


@pytest.mark.parametrize("case", DECODE + EXTEND + VERIFY, ids=lambda case: case.name)
def test_equals_the_oracle(case):
    inputs, offset = make_inputs(case)
    np.testing.assert_allclose(run(case, inputs, offset), expected(case, inputs, offset), rtol=0, atol=TOLERANCE[case.dtype])


def test_the_oracle_is_softmax_attention():
    """The oracle itself, against a dense formula on one unpaged row."""
    case = Case(name="dense", num_heads=4, num_kv_heads=2, head_dim=8, page_size=32, rows=((9, 9),))
    inputs, offset = make_inputs(case)
    keys, values = (
        np.repeat(np.moveaxis(cache[inputs.page_table[0, 0], :, :9].astype(np.float64), 0, 1), 2, axis=1)
        for cache in (inputs.k_cache, inputs.v_cache)
    )
    scores = np.einsum("tnh,snh->nts", inputs.q, keys) * case.scale
    scores[:, ~np.tri(9, dtype=bool)] = -np.inf
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(expected(case, inputs, offset), np.einsum("nts,snh->tnh", weights, values), atol=1e-12)


LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257]


def small_case(*rows, window=0):
    """Up to four rows of up to 400 queries in one shape, so that all such cases share one compiled program."""
    return Case(
        name="",
        num_heads=3,
        num_kv_heads=1,
        head_dim=4,
        page_size=16,
        rows=rows + ((0, 0),) * (4 - len(rows)),
        table_pages=19,
        pool_pages=80,
        padded_tokens=400 - sum(count for _, count in rows),
        window=window,
    )


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.sampled_from(LENGTHS), st.integers(1, 257)), min_size=1, max_size=4),
    st.sampled_from([0, 1, 7, 16, 128, 129, 1000]),
    st.integers(0, 2**16),
)
def test_any_lengths_around_page_tile_and_chunk_borders(rows, window, seed):
    limit = 400 // len(rows)
    case = small_case(*((length, min(count, length, limit)) for length, count in rows), window=window)
    inputs, offset = make_inputs(case, seed=seed)
    np.testing.assert_allclose(run(case, inputs, offset), expected(case, inputs, offset), rtol=0, atol=3e-6)


@pytest.mark.parametrize("window", [1, 5, 16, 17, 40, 64, 1000])
def test_windows_shorter_equal_and_longer_than_the_row(window):
    case = small_case((40, 1), (64, 64), (17, 5), (300, 60), window=window)
    inputs, offset = make_inputs(case)
    np.testing.assert_allclose(run(case, inputs, offset), expected(case, inputs, offset), rtol=0, atol=3e-6)


def test_pages_in_front_of_the_window_are_never_seen():
    """They may have been given to another row: here they hold NaN, or are the null page."""
    case = small_case((200, 20), (161, 1), window=17)
    inputs, offset = make_inputs(case)
    right = expected(case, inputs, offset)
    gone = inputs.page_table[0, : (200 - 20 - 16) // 16]
    inputs.k_cache[gone] = inputs.v_cache[gone] = np.nan
    inputs.page_table[1, : (161 - 17) // 16] = 0
    np.testing.assert_allclose(run(case, inputs, offset), right, rtol=0, atol=3e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_no_row_owns_never_reaches_the_output(poison):
    case = RAGGED_DECODE
    clean, offset = make_inputs(case, poison=0.0)
    dirty, _ = make_inputs(case, poison=poison)
    np.testing.assert_array_equal(run(case, dirty, offset), run(case, clean, offset))


def test_nan_of_one_row_stays_in_that_row():
    case = RAGGED_EXTEND
    inputs, offset = make_inputs(case)
    right = run(case, inputs, offset)
    own = slice(inputs.query_starts[5], inputs.query_starts[6])
    page = inputs.page_table[5, 0] + offset
    inputs.v_cache[page, :, 3] = inputs.k_cache[page, :, 7] = np.nan
    result = run(case, inputs, offset)
    assert np.isnan(result[own]).all()
    result[own] = right[own]
    np.testing.assert_array_equal(result, right)


@pytest.mark.parametrize("case", [RAGGED_DECODE, RAGGED_EXTEND], ids=lambda case: case.name)
def test_a_row_alone_equals_the_row_in_a_batch(case):
    """Bit for bit: among any neighbours, in any place, whatever the bucket."""
    inputs, offset = make_inputs(case)
    together = run(case, inputs, offset)
    bucket = 1 if case.decode else 80
    for row, (_, count) in enumerate(case.rows):
        own = slice(inputs.query_starts[row], inputs.query_starts[row] + count)
        q = np.full((bucket, *inputs.q.shape[1:]), np.nan, np.float32)
        q[:count] = inputs.q[own]
        alone = inputs._replace(
            q=q,
            page_table=inputs.page_table[row : row + 1],
            seq_lens=inputs.seq_lens[row : row + 1],
            query_starts=np.array([0, count], np.int32),
        )
        np.testing.assert_array_equal(run(case, alone, offset)[:count], together[own])


def test_a_prompt_in_chunks_equals_the_whole_prompt():
    """Bit for bit, because chunks of keys start at the same places however the prompt is cut. A single query goes another way,
    where the matmuls may add in another order."""
    case = small_case((257, 257))
    inputs, offset = make_inputs(case)
    whole = run(case, inputs, offset)
    for length, count in ((257, 7), (150, 64), (129, 129), (128, 2), (200, 1), (1, 1)):
        q = np.full_like(inputs.q, np.nan)
        q[:count] = inputs.q[length - count : length]
        part = inputs._replace(
            q=q, seq_lens=np.array([length, 0, 0, 0], np.int32), query_starts=np.array([0] + 4 * [count], np.int32)
        )
        result, right = run(case, part, offset)[:count], whole[length - count : length]
        if count > 1:
            np.testing.assert_array_equal(result, right)
        else:
            np.testing.assert_allclose(result, right, rtol=0, atol=1e-6)


def test_page_size_does_not_change_the_result():
    """Bit for bit if both divide the chunk of keys."""
    results = []
    for page_size in (16, 64):
        inputs, offset = make_inputs(dataclasses.replace(RAGGED_EXTEND, page_size=page_size))
        random = np.random.default_rng(5)
        for row, length in enumerate(inputs.seq_lens):
            token = np.arange(length)
            slots = (inputs.page_table[row, token // page_size] + offset, slice(None), token % page_size)
            inputs.k_cache[slots] = random.standard_normal((length, 3, 64))
            inputs.v_cache[slots] = random.standard_normal((length, 3, 64))
        inputs = inputs._replace(q=random.standard_normal(inputs.q.shape).astype(np.float32))
        results.append(run(RAGGED_EXTEND, inputs, offset))
    np.testing.assert_array_equal(results[1], results[0])


def test_the_oracle_adds_both_biases_behind_the_soft_cap():
    """The oracle itself, against a dense formula on one unpaged row."""
    case = Case(
        name="", num_heads=2, num_kv_heads=2, head_dim=8, page_size=32, rows=((9, 9),), soft_cap=0.5, alibi=True, bias_width=4
    )
    inputs, offset = make_inputs(case)
    biases = make_biases(case)
    page = inputs.page_table[0, 0]
    keys, values = (np.moveaxis(cache[page, :, :9].astype(np.float64), 0, 1) for cache in (inputs.k_cache, inputs.v_cache))
    scores = 0.5 * np.tanh(np.einsum("tnh,snh->nts", inputs.q, keys) * case.scale / 0.5)
    distance = np.arange(9)[:, None] - np.arange(9)
    scores -= biases["alibi_slopes"][:, None, None] * distance
    scores += biases["relative_bias"][:, np.clip(distance, 0, 3)]
    scores[:, distance < 0] = -np.inf
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(expected(case, inputs, offset), np.einsum("nts,snh->tnh", weights, values), atol=1e-12)


def test_repeated_calls_are_equal():
    case = RAGGED_EXTEND
    inputs, offset = make_inputs(case)
    first = run(case, inputs, offset)
    for _ in range(3):
        np.testing.assert_array_equal(run(case, inputs, offset), first)


@pytest.mark.parametrize("case", [RAGGED_DECODE, RAGGED_EXTEND], ids=lambda case: case.name)
def test_the_gpu_tiling_gives_the_same(case):
    """What runs on a GPU with this implementation, on CPU: groups of many tiles instead of one."""
    inputs, offset = make_inputs(case)
    attention = jax.jit(functools.partial(xla._attention, scale=case.scale, soft_cap=0.0, single=case.decode, tiling=xla.GPU))
    result = attention(*inputs, jnp.int32(offset), jnp.int32(50), xla.Biases(None, None))
    np.testing.assert_allclose(np.asarray(result), expected(case, inputs, offset, 50), rtol=0, atol=3e-6)


def test_works_inside_a_larger_program_with_the_layer_as_data():
    case = RAGGED_DECODE
    inputs, _ = make_inputs(case)
    pages = inputs.k_cache.shape[0] // case.layers
    arrays = [jnp.asarray(x) for x in inputs]

    @jax.jit
    def layers(q, *rest):
        def one(layer):
            return paged_attention(q, *rest, page_offset=layer * pages, scale=case.scale, decode=True)

        return jax.lax.map(one, jnp.arange(3))

    result = np.asarray(layers(*arrays))
    np.testing.assert_allclose(result[case.layer], expected(case, inputs, case.layer * pages), rtol=0, atol=3e-6)
    assert np.isnan(result[0, 0]).all()  # the other layers hold nothing but poison


def zeros(q=(4, 4, 8), cache=(5, 2, 16, 8), rows=4, starts=5, columns=3):
    return (
        jnp.zeros(q),
        jnp.zeros(cache),
        jnp.zeros(cache),
        jnp.zeros((rows, columns), jnp.int32),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros(starts, jnp.int32),
    )


@pytest.mark.parametrize(
    ("changes", "decode", "message"),
    [
        ({"q": (4, 33, 8)}, True, "33 query heads are not a multiple of 2 kv heads"),
        ({"q": (4, 3, 8)}, True, "3 query heads are not a multiple of 2 kv heads"),
        ({"q": (4, 4, 6)}, True, "head dims of q and cache must be equal and even, got 6, 8"),
        ({"q": (4, 4, 7), "cache": (5, 2, 16, 7)}, True, "equal and even, got 7, 7"),
        ({"q": (9, 4, 8)}, True, "got 9 queries for 4 rows"),
        ({"starts": 4}, False, "query_starts"),
        ({"q": (4, 8)}, False, "takes q"),
    ],
)
def test_wrong_shapes_are_refused_before_launch(changes, decode, message):
    with pytest.raises(ValueError, match=message):
        paged_attention(*zeros(**changes), page_offset=0, scale=1.0, decode=decode)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode": True, "max_queries": 2}, "with decode at most 1, got 2"),
        ({"decode": False, "max_queries": -1}, "max_queries is positive, or 0"),
        ({"decode": True, "alibi_slopes": jnp.zeros(3)}, "alibi_slopes .N. for 4 heads"),
        ({"decode": True, "relative_bias": jnp.zeros((4, 0))}, "relative_bias .N, W. for 4 heads"),
        ({"decode": True, "relative_bias": jnp.zeros((2, 9))}, "relative_bias .N, W. for 4 heads"),
    ],
)
def test_wrong_promises_and_biases_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        paged_attention(*zeros(), page_offset=0, scale=1.0, **options)
