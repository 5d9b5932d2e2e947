"""Flash attention and its gradients against a dense formula in float64; everything no row owns holds NaN."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.flash_attention import flash_attention, reference, xla, xla_gradient
from pallas_kernels.flash_attention.shapes import CASES, Case, make_biases, make_inputs

TOLERANCE = {"float32": 5e-6, "bfloat16": 2e-2}
BY_NAME = {case.name: case for case in CASES}
EVERYTHING = BY_NAME["everything"]
GRADIENTS = [
    EVERYTHING,
    BY_NAME["relative bias in both directions"],
    *(
        pytest.param(BY_NAME[name], marks=pytest.mark.slow, id=name)
        for name in ("both directions", "mask for all heads", "bfloat16")
    ),
]


def arrays(case, seed):
    """The floating operands by name, rounded to the case's dtype, and the starts."""
    inputs = make_inputs(case, seed=seed)
    floats = dict(zip("qkv", inputs[:3], strict=True)) | make_biases(case, seed=seed)
    return {name: jnp.asarray(x, case.dtype if name in "qkv" else None) for name, x in floats.items()}, inputs[3:]


def attend(case, floats, starts, **changes):
    q, k, v, biases = floats["q"], floats["k"], floats["v"], {name: x for name, x in floats.items() if name not in "qkv"}
    return flash_attention(q, k, v, *map(jnp.asarray, starts), **{**case.options, "return_lse": True, **biases, **changes})


def widened(case, floats, starts):
    """Operands as the float64 formulas take them: positional, and the options."""
    wide = {name: np.asarray(x.astype(jnp.float32), np.float64) for name, x in floats.items()}
    biases = {name: x for name, x in wide.items() if name not in "qkv"}
    return (wide["q"], wide["k"], wide["v"], *starts), case.options | biases


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_dense_formula(case):
    compare(case, np.random.SeedSequence().entropy)


def compare(case, seed):
    floats, starts = arrays(case, seed)
    out, lse = attend(case, floats, starts)
    assert out.dtype == case.dtype
    assert lse.dtype == jnp.float32
    operands, options = widened(case, floats, starts)
    for one, right in zip((out, lse), reference.flash_attention(*operands, **options), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float64), right, rtol=0, atol=TOLERANCE[case.dtype])
    alone = attend(case, floats, starts, return_lse=False)
    np.testing.assert_array_equal(np.asarray(alone, np.float32), np.asarray(out, np.float32))


@pytest.mark.parametrize("case", GRADIENTS, ids=lambda case: getattr(case, "name", None))
def test_gradients_equal_those_of_the_dense_formula(case):
    """By every differentiable operand, through both results; nothing reaches what no row owns."""
    seed = np.random.SeedSequence().entropy
    floats, starts = arrays(case, seed)
    random = np.random.default_rng(seed)
    results, pull = jax.vjp(lambda floats: attend(case, floats, starts), floats)
    d_out, d_lse = (jnp.asarray(random.standard_normal(x.shape), x.dtype) for x in results)
    (found,) = pull((d_out, d_lse))
    operands, options = widened(case, floats, starts)
    d_results = (np.asarray(x.astype(jnp.float32), np.float64) for x in (d_out, d_lse))
    right = reference.gradients(*operands, *d_results, **options)
    assert found.keys() == right.keys()
    for name, gradient in found.items():
        assert gradient.dtype == floats[name].dtype
        allowed = np.abs(right[name]).max() * (3e-2 if case.dtype == "bfloat16" else 1e-5)
        np.testing.assert_allclose(np.asarray(gradient, np.float64), right[name], rtol=0, atol=allowed, err_msg=name)


def test_the_dense_gradients_are_those_of_the_dense_formula():
    """The reference itself, by finite differences along a random direction."""
    case = dataclasses.replace(EVERYTHING, rows=((9, 9), (30, 4)), masks=1, padded_tokens=0)
    floats, starts = arrays(case, None)
    (q, k, v, *starts), options = widened(case, floats, starts)
    wide = {"q": q, "k": k, "v": v} | {name: options.pop(name) for name in ("alibi_slopes", "relative_bias", "mask")}
    wide["mask"] = np.nan_to_num(wide["mask"], neginf=-30.0)  # a query that sees nothing has no gradient by its log-sum-exp
    random = np.random.default_rng()
    d_out, d_lse = random.standard_normal(q.shape), random.standard_normal(q.shape[:2])

    def total(wide):
        q, k, v = wide["q"], wide["k"], wide["v"]
        biases = {name: x for name, x in wide.items() if name not in "qkv"}
        out, lse = reference.flash_attention(q, k, v, *starts, **options, **biases)
        return (out * d_out).sum() + (lse * d_lse).sum(), biases

    direction = {name: random.standard_normal(x.shape) for name, x in wide.items()}
    step = 1e-5
    ahead, behind = (total({n: x + sign * step * direction[n] for n, x in wide.items()})[0] for sign in (1, -1))
    _, biases = total(wide)
    found = reference.gradients(wide["q"], wide["k"], wide["v"], *starts, d_out, d_lse, **options, **biases)
    slope = sum((found[name] * direction[name]).sum() for name in found)
    np.testing.assert_allclose((ahead - behind) / (2 * step), slope, rtol=1e-5, atol=1e-5)


def test_the_gpu_blocks_give_the_same():
    """What runs on a GPU with this implementation, on CPU: all keys of a row in one chunk."""
    case = dataclasses.replace(EVERYTHING, masks=1, rows=((70, 70), (130, 3)))
    floats, starts = arrays(case, None)
    rows = xla.Rows(*map(jnp.asarray, starts), jnp.int32(case.window))
    biases = xla.Biases(floats["alibi_slopes"], floats["relative_bias"], floats["mask"])
    static = {"causal": True, "scale": case.scale, "soft_cap": case.soft_cap, "blocks": xla.GPU}
    operands = floats["q"], floats["k"], floats["v"], biases, rows
    out, lse = map(np.asarray, jax.jit(functools.partial(xla._forward, **static))(*operands))
    dense, options = widened(case, floats, starts)
    right_out, right_lse = reference.flash_attention(*dense, **options)
    np.testing.assert_allclose(out, right_out, rtol=0, atol=5e-6)
    np.testing.assert_allclose(lse, right_lse, rtol=0, atol=5e-6)
    d_out = np.random.default_rng().standard_normal(out.shape).astype(np.float32)
    mean = (out * d_out).sum(axis=-1)
    found = jax.jit(functools.partial(xla_gradient._gradients, **static))(*operands, lse, mean, d_out)
    right = reference.gradients(*dense, d_out, np.zeros_like(lse), **options)
    for name, gradient in {"q": found.q, "k": found.k, "v": found.v, "relative_bias": found.biases.table}.items():
        np.testing.assert_allclose(gradient, right[name], rtol=0, atol=1e-5 * np.abs(right[name]).max(), err_msg=name)


@settings(max_examples=8)
@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129, 200]), st.integers(1, 200)), min_size=1, max_size=3),
    st.sampled_from([0, 1, 64, 129]),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_any_lengths_around_tile_and_chunk_borders(rows, window, causal, seed):
    rows = tuple((keys, min(keys, count)) for keys, count in rows)
    keys, queries = np.sum(rows, axis=0)
    case = Case(  # one shape, so that all share a compiled program
        name="", num_heads=2, num_kv_heads=1, head_dim=8, rows=rows + ((0, 0),) * (3 - len(rows)),
        padded_tokens=600 - queries, padded_keys=600 - keys, causal=causal, window=window,
    )  # fmt: skip
    compare(case, seed)


def test_one_row_needs_no_starts():
    case = BY_NAME["one key"]
    floats, starts = arrays(case, 2)
    whole = flash_attention(floats["q"], floats["k"], floats["v"])
    np.testing.assert_array_equal(whole, attend(case, floats, starts, return_lse=False))


def test_vmap_over_a_batch_of_equal_shapes_with_gradients():
    random = np.random.default_rng()
    q, k, v = (jnp.asarray(random.standard_normal((3, 33, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    bias = jnp.asarray(random.standard_normal((4, 9)), jnp.float32)

    def total(q, k, v, bias):
        return (flash_attention(q, k, v, relative_bias=bias) ** 2).sum()

    gradient = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))
    batched = jax.jit(jax.vmap(gradient, in_axes=(0, 0, 0, None)))(q, k, v, bias)
    for index in range(3):
        one = gradient(q[index], k[index], v[index], bias)
        jax.tree.map(lambda a, b, index=index: np.testing.assert_allclose(a[index], b, rtol=0, atol=1e-4), batched, one)


def test_nan_of_one_row_stays_in_that_row_and_its_gradients():
    case = BY_NAME["ragged, prefixes, padding"]
    floats, starts = arrays(case, 3)
    owned = (np.arange(len(floats["q"])) < starts[0][-1])[:, None, None]

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def run(floats):
        out = attend(case, floats, starts, return_lse=False)
        return jnp.where(owned, out, 0).sum(), out

    right, right_out = run(floats)
    queries, keys = (np.r_[slice(start[2], start[3])] for start in starts)
    poisoned = {name: x if name == "q" else x.at[starts[1][2] + 3].set(jnp.nan) for name, x in floats.items()}
    found, out = run(poisoned)
    assert np.isnan(out[queries]).any()
    pairs = [(queries, out, right_out), *((keys if name != "q" else queries, found[name], right[name]) for name in "qkv")]
    for own, one, other in pairs:
        np.testing.assert_array_equal(np.delete(one, own, axis=0), np.delete(other, own, axis=0))


def test_memory_does_not_grow_with_queries_times_keys():
    """Neither forward nor backward: what the compiled program needs beside operands and results grows like its operands."""

    def temporaries(tokens):
        q, kv = (jax.ShapeDtypeStruct((tokens, heads, 16), jnp.float32) for heads in (8, 1))
        value = jax.value_and_grad(lambda q, k, v: flash_attention(q, k, v).sum(), argnums=(0, 1, 2))
        return jax.jit(value).lower(q, kv, kv).compile().memory_analysis().temp_size_in_bytes

    small, large = temporaries(2048), temporaries(8192)
    assert large < 5 * small
    assert large < 8 * 8192 * 8192 * 4 / 20  # a score matrix


@pytest.mark.parametrize("shape", [(0, 5), (4, 0)])
def test_nothing_to_do(shape):
    queries, keys = shape
    out, lse = flash_attention(jnp.ones((queries, 2, 8)), jnp.ones((keys, 2, 8)), jnp.ones((keys, 2, 8)), return_lse=True)
    assert out.shape == (queries, 2, 8)
    assert (np.asarray(out) == 0).all()
    assert (np.asarray(lse) == -np.inf).all()


def ones(*shape):
    return jnp.ones(shape)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": ones(1, 4, 2, 8)}, r"takes q \[T, N, H\].*use jax.vmap"),
        ({"v": ones(6, 2, 4)}, "one dtype and shape"),
        ({"v": jnp.ones((6, 2, 8), jnp.bfloat16)}, "one dtype and shape"),
        ({"q": ones(4, 5, 8)}, "5 query heads of 8 do not go with 2 kv heads of 8"),
        ({"q": ones(4, 4, 16)}, "4 query heads of 16 do not go"),
        ({"query_starts": jnp.array([0, 2, 4])}, r"\[R \+ 1\] of the same rows"),
        ({"alibi_slopes": ones(3)}, "alibi_slopes .N. for 4 heads"),
        ({"relative_bias": ones(4, 0)}, "relative_bias .N, W. for 4 heads"),
        ({"relative_bias": ones(4, 6), "causal": False}, "odd width"),
        ({"mask": ones(2, 4, 6)}, r"mask \[1 or 4, 4, 6\]"),
        ({"mask": ones(4, 6)}, r"mask \[1 or 4, 4, 6\]"),
    ],
)
def test_wrong_shapes_are_refused(changes, message):
    arguments = {"q": ones(4, 4, 8), "k": ones(6, 2, 8), "v": ones(6, 2, 8)}
    with pytest.raises(ValueError, match=message):
        flash_attention(**{**arguments, **changes})
