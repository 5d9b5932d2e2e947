"""Sizes of the W8A8 kernel for many tokens: what a configuration is, what follows from it, and which are worth timing.

Owns the configuration, the plan, and a rough model of the device that orders configurations. Must not know how the kernel works
inside, nor what was measured.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping

import jax.numpy as jnp

from pallas_kernels.matmul.mosaic_plan import COPY_REGISTERS, SHARED_BYTES

BLOCK = 64  # rows and columns of the output written at a time; also wgmma's M
K_STEP = 128  # elements of the contraction a step loads: a swizzled line of int8
WARPGROUPS = 2  # that multiply
STAGING = 2  # blocks of the output on their way to memory, for each of them

_MIN_STAGES, _MAX_STAGES = 3, 8
_OTHER_REGISTERS = 72  # a thread needs beside its sums: scales, the epilogue's floats, addresses
_CANDIDATES = 16

# The H200
_CORES = 132
_MULTIPLY_EACH = 11.7e12  # int8 operations/s of a multiprocessor
_NARROW = {64: 1.35, 128: 1.05, 256: 1.0}  # what a product of so many columns takes more, as wgmma reads its left operand again
_CACHE = 8.8e12  # bytes/s of the second-level cache
_TILE = 1.5e-6  # seconds of a tile's epilogue, in which nothing is multiplied


@dataclasses.dataclass(frozen=True)
class TilesConfig:
    """How a matmul of many tokens is laid out on the device.

    Attributes:
        rows: tokens of a warpgroup, a multiple of 64; a tile has twice as many.
        columns: of the output, in a tile; of gate and of up as many each.
        stages: steps in flight.
        share: CTAs of a cluster that take neighbouring columns and load the tokens once for all of them.
        band: tiles along the tokens that are walked together, so that the cache holds what they have in common.
        clusters: groups of `share` CTAs that walk the tiles.
    """

    rows: int = 128
    columns: int = 128
    stages: int = 4
    share: int = 1
    band: int = 8
    clusters: int = _CORES


@dataclasses.dataclass(frozen=True)
class TilesPlan:
    """What follows from a shape and a configuration.

    Attributes:
        tokens: of the call, rounded up to 64.
        columns_out: of the output.
        pair: weight matrices a tile takes: 2 when gated (gate and up), else 1.
    """

    config: TilesConfig
    tokens: int
    columns_out: int
    depth: int
    pair: int
    out_itemsize: int

    @property
    def tile_tokens(self) -> int:
        return self.config.rows * WARPGROUPS

    @property
    def token_tiles(self) -> int:
        return math.ceil(self.tokens / self.tile_tokens)

    @property
    def column_tiles(self) -> int:
        """As a cluster walks them: `share` neighbours are one."""
        return math.ceil(self.columns_out / (self.config.columns * self.config.share))

    @property
    def tiles(self) -> int:
        return self.token_tiles * self.column_tiles

    @property
    def clusters(self) -> int:
        return min(self.config.clusters, self.tiles)

    @property
    def steps(self) -> int:
        """Steps of a tile."""
        return self.depth // K_STEP

    @property
    def step_bytes(self) -> int:
        return (self.tile_tokens + self.pair * self.config.columns) * K_STEP

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, without its barriers."""
        return self.config.stages * self.step_bytes + WARPGROUPS * STAGING * BLOCK * BLOCK * self.out_itemsize

    @property
    def accumulators(self) -> int:
        """Registers a thread needs for its sums."""
        return self.pair * self.config.rows * self.config.columns // 128


REGISTERS = (512 - COPY_REGISTERS) // WARPGROUPS // 8 * 8
"""Registers of a thread that multiplies."""


def make_plan(key: Mapping[str, int | str], config: TilesConfig) -> TilesPlan:
    """Sizes of a call."""
    return TilesPlan(
        config=config,
        tokens=math.ceil(int(key["tokens"]) / BLOCK) * BLOCK,
        columns_out=int(key["out"]),
        depth=int(key["in"]),
        pair=2 if "activation" in key else 1,
        out_itemsize=jnp.dtype(key["out_dtype"]).itemsize,
    )


def fits(plan: TilesPlan) -> bool:
    """Whether a device has the registers and the shared memory."""
    return plan.accumulators + _OTHER_REGISTERS <= REGISTERS and plan.shared_bytes <= SHARED_BYTES


def candidates(key: Mapping[str, int | str]) -> list[TilesConfig]:
    """Configurations worth timing, by a rough model the most promising first; but the first of all, which is the default, shares
    nothing between CTAs: a table of the device says where that pays. All fit the device."""
    found = []
    shapes = itertools.product((64, 128), (64, 128, 256), (1, 2), (4, 8, 16))
    for rows, columns, share, band in shapes:
        config = TilesConfig(rows, columns, 1, share, band, _CORES // share)
        plan = make_plan(key, config)
        if band > 4 and band >= 2 * plan.token_tiles:  # as good as a narrower one
            continue
        stages = min(_MAX_STAGES, 1 + (SHARED_BYTES - plan.shared_bytes) // plan.step_bytes)
        config = dataclasses.replace(config, stages=stages)
        if stages >= _MIN_STAGES and fits(make_plan(key, config)):
            found.append(config)
    ranked = sorted(found, key=lambda config: _seconds(make_plan(key, config)))
    alone = next(config for config in ranked if config.share == 1)
    return list(dict.fromkeys((alone, *ranked)))[:_CANDIDATES]


def _seconds(plan: TilesPlan) -> float:
    """A rough time of a call; it orders configurations, the device decides."""
    config = plan.config
    rounds = math.ceil(plan.tiles / plan.clusters)
    operations = 2 * plan.tile_tokens * plan.pair * config.columns * K_STEP * plan.steps
    multiply = operations / _MULTIPLY_EACH * _NARROW[config.columns]
    loaded = (plan.tile_tokens / config.share + plan.pair * config.columns) * K_STEP * plan.steps
    read = loaded * plan.clusters * config.share / _CACHE
    odd = 0.002 * (config.band != 8) + 0.01 * (config.stages < 4)
    return rounds * (max(multiply, read) * (1 + odd) + _TILE)
