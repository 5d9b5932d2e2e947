"""Patterns that name weights: the one language of every place that says which weights become what. Host only.

A pattern is a name of `GROUPS`; or it is compared, with the wildcards * ? [], with a weight's whole name
("layers.3.mlp.down.weight") and with each beginning and each end of it between dots ("layers.3", "mlp.down.weight", "down").
Of several that match, the last one has the word.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator

from llmjax.model.param_spec import Path, is_norm, leaf_name

GROUPS: dict[str, tuple[str, ...]] = {
    "linear": ("layers.*.attention.*.weight", "layers.*.mlp.*.weight"),
    "attention": ("layers.*.attention.*.weight",),
    "mlp": ("layers.*.mlp.*.weight",),
    "embeddings": ("embed.weight",),
    "head": ("lm_head.weight",),
}
"""Names that stand for several weights. Norms are float32 in every group."""


def matches(pattern: str, path: Path) -> bool:
    """Whether a pattern names the leaf at a path."""
    names = GROUPS.get(pattern)
    if names is not None:
        return not is_norm(path) and any(fnmatch.fnmatchcase(leaf_name(path), name) for name in names)
    return any(fnmatch.fnmatchcase(name, pattern) for name in _partial_names(path))


def _partial_names(path: Path) -> Iterator[str]:
    """The name, its beginnings and ends, and the ends of the name without "weight"."""
    for whole in (path, path[:-1]):
        for cut in range(len(whole)):
            yield leaf_name(whole[: cut + 1])
            yield leaf_name(whole[cut:])
