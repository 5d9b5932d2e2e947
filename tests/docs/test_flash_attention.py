"""The code in docs/flash_attention.md runs as it stands, and its gradient is the slope of its loss."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

DOC = Path(__file__).resolve().parents[2] / "docs" / "flash_attention.md"


def test_the_example_runs_and_its_gradient_is_the_slope() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    scope: dict[str, Any] = {}
    exec(compile(code, str(DOC), "exec"), scope)
    assert scope["d_q"].shape == scope["q"].shape
    assert scope["d_k"].shape == scope["k"].shape
    step = jnp.asarray(np.random.default_rng().standard_normal(scope["v"].shape), jnp.float32)  # the loss is quadratic in v
    ahead, behind = (scope["loss"](scope["q"], scope["k"], scope["v"] + sign * step, scope["slopes"]) for sign in (1, -1))
    np.testing.assert_allclose((ahead - behind) / 2, (scope["d_v"] * step).sum(), rtol=1e-3, atol=1e-3 * float(ahead))
