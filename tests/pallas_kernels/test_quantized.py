"""Int8 weights: how near they are to what was quantised, what has no scale, and that the container is a pytree like any other."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental.mosaic.gpu import fragmented_array as fa

from pallas_kernels.quantized import QuantizedTensor, check_finite, dequantize, pack, quantize, reorder, unpack


@pytest.fixture
def random():
    return np.random.default_rng()


def wide(x):
    return np.asarray(x, np.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axis", [1, None])
def test_no_value_is_off_by_more_than_half_a_step(random, axis, dtype):
    rows = random.standard_normal((37, 96)) * 10 ** random.uniform(-6, 6, (37, 1))
    w = jnp.asarray(rows, dtype)
    q = quantize(w, axis=axis)
    scale = np.broadcast_to(wide(q.scale), 37)[:, None]
    assert q.qvalue.dtype == jnp.int8
    assert q.scale.dtype == jnp.float32
    assert q.scale.shape == ((37,) if axis == 1 else ())
    assert (np.abs(wide(w) - wide(q.qvalue) * scale) <= scale * (0.5 + 1e-4)).all()
    largest = np.abs(wide(q.qvalue)).max(axis=axis)
    assert (largest == 127).all()
    np.testing.assert_allclose(wide(dequantize(q)), wide(q.qvalue) * scale, rtol=1e-6)


def test_each_channel_has_the_scale_of_its_own_largest_magnitude(random):
    w = random.standard_normal((5, 64)).astype(np.float32)
    w[2, 7] = -1e4  # an outlier takes its own row's precision and nobody else's
    q = quantize(jnp.asarray(w))
    np.testing.assert_allclose(wide(q.scale), np.abs(w).max(axis=1) / 127, rtol=1e-6)
    error = np.abs(wide(dequantize(q)) - w).max(axis=1)
    assert q.qvalue[2, 7] == -127
    assert (error[[0, 1, 3, 4]] < 0.02).all()
    assert (np.abs(wide(q.qvalue[2])) <= 1).sum() == 63


def test_a_row_of_zeros_and_of_next_to_nothing_stays_finite():
    w = jnp.zeros((3, 32)).at[1].set(1e-42).at[2].set(3.0)  # the second is subnormal
    q = quantize(w)
    assert np.isfinite(wide(q.scale)).all()
    assert (wide(q.scale) > 0).all()
    np.testing.assert_array_equal(wide(dequantize(q))[:2], 0)
    np.testing.assert_array_equal(q.qvalue[2], 127)  # equal values are all the largest
    np.testing.assert_allclose(dequantize(q)[2], 3.0, rtol=1e-6)


def test_halves_round_to_even():
    w = jnp.asarray([[127.0, 0.5, 1.5, -0.5, -2.5, 126.5]])
    np.testing.assert_array_equal(quantize(w).qvalue[0], [127, 0, 2, 0, -2, 126])


def test_it_quantises_as_often_as_one_likes(random):
    """What was quantised is on the grid already."""
    once = quantize(jnp.asarray(random.standard_normal((16, 64)), jnp.float32))
    again = quantize(dequantize(once))
    np.testing.assert_array_equal(once.qvalue, again.qvalue)
    np.testing.assert_allclose(once.scale, again.scale, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_by_name(random, bad):
    w = random.standard_normal((8, 16))
    check_finite("layers.3.mlp.down", jnp.asarray(w))
    w[5, 11] = w[7, 0] = bad
    with pytest.raises(ValueError, match=r"layers\.3\.mlp\.down: 2 values are NaN or infinite, the first at \[5, 11\]"):
        check_finite("layers.3.mlp.down", jnp.asarray(w))


@pytest.mark.parametrize(("shape", "axis"), [((8,), 1), ((2, 8, 8), 1), ((8, 8), 0), ((8, 8), (0, 1))])
def test_what_is_no_weight_is_an_error(shape, axis):
    with pytest.raises(ValueError, match="takes a weight"):
        quantize(jnp.ones(shape), axis=axis)


def test_packed_is_the_same_weight_in_another_order(random):
    q = quantize(jnp.asarray(random.standard_normal((8, 48)), jnp.float32))
    packed = pack(q)
    assert packed.packed
    assert (packed.qvalue != q.qvalue).any()
    assert pack(packed) is packed
    assert unpack(q) is q
    np.testing.assert_array_equal(unpack(packed).qvalue, q.qvalue)
    np.testing.assert_array_equal(dequantize(packed), dequantize(q))
    np.testing.assert_array_equal(wide(q.qvalue) @ wide(q.qvalue).T, wide(packed.qvalue) @ wide(packed.qvalue).T)
    with pytest.raises(ValueError, match="blocks of 16, got 40"):
        pack(quantize(jnp.ones((8, 40))))


def columns_of(layout, lane):
    """The columns of a [64, 16] tile that a lane of the first warp holds in its row, in the order of its registers."""
    strides = layout.tiling.tile_strides((16, 1))
    lanes = [layout.tiled_tiling_shape[dim] for dim in layout.lane_dims]
    start = sum(int(i) * strides[dim] for i, dim in zip(np.unravel_index(lane, lanes), layout.lane_dims, strict=True))
    tiles = [sum(i * s for i, s in zip(at, strides, strict=False)) for at in np.ndindex(layout.registers_shape((64, 16)))]
    offsets = [start + tile + i for tile in tiles for i in range(layout.vector_length)]
    row = start // 16
    return [offset % 16 for offset in offsets if offset // 16 == row]


def test_packed_columns_are_where_the_tensor_core_wants_them():
    """A thread that loads four packed neighbours holds the columns that a thread holds of a bfloat16 operand, pair by pair."""
    order = np.asarray(reorder(jnp.arange(16)))  # place in memory -> column
    for lane in range(32):
        loaded = [int(order[at]) for at in columns_of(fa.WGMMA_LAYOUT_UPCAST_2X, lane)]
        assert loaded == columns_of(fa.WGMMA_LAYOUT, lane), lane


def test_it_is_a_pytree(random):
    q = pack(quantize(jnp.asarray(random.standard_normal((8, 32)), jnp.float32)))
    doubled = jax.tree.map(lambda a: a + a, q)
    assert isinstance(doubled, QuantizedTensor)
    assert doubled.packed
    np.testing.assert_array_equal(jax.jit(dequantize)(q), dequantize(q))
    shapes = jax.eval_shape(lambda w: w, q)
    assert shapes.shape == (8, 32)
    assert shapes.ndim == 2
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(q)]
    assert names == [".qvalue", ".scale"]


def test_orbax_keeps_it(random, tmp_path):
    tree = {"w": quantize(jnp.asarray(random.standard_normal((8, 32)), jnp.float32))}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "w", tree)
        checkpointer.wait_until_finished()
        back = checkpointer.restore(tmp_path / "w", jax.eval_shape(lambda t: t, tree))
    assert isinstance(back["w"], QuantizedTensor)
    jax.tree.map(np.testing.assert_array_equal, tree, back)
