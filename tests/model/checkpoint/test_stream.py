"""Streaming onto the device: few leaves on the host at a time, and failures that end the load."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_checkpoints import tiny_config

from llmjax.errors import ModelError
from llmjax.model.checkpoint.leaves import Checkpoint, plan_leaves
from llmjax.model.checkpoint.safetensors import HF_NAMING
from llmjax.model.checkpoint.stream import load_leaves
from llmjax.model.hf_config import parse_hf_config


class CountingReader:
    """Tensors of zeros; counts how many were read."""

    path = Path("counting")

    def __init__(self, leaves, fail_at: str = "") -> None:
        self.tensors = {
            piece.name: SimpleNamespace(shape=piece.shape, num_bytes=1, type_name="F32")
            for leaf in leaves
            for piece in leaf.pieces
        }
        self.fail_at = fail_at
        self.started: set[str] = set()
        self.lock = threading.Lock()

    def read_into(self, name: str, out: np.ndarray) -> None:
        with self.lock:
            self.started.add(name)
        if name == self.fail_at:
            raise ModelError(f"cannot read {name}")
        out[:] = 0

    def close(self) -> None: ...


def checkpoint(num_layers: int, fail_at: str = "") -> tuple[Checkpoint, CountingReader]:
    config = parse_hf_config(tiny_config(num_hidden_layers=num_layers))
    leaves = plan_leaves(config, HF_NAMING)
    reader = CountingReader(leaves, fail_at)
    return Checkpoint("fake", Path("counting"), config, (), leaves, reader), reader


def test_only_a_few_leaves_are_ahead_of_the_device():
    opened, reader = checkpoint(num_layers=20)
    of_leaf = {piece.name: index for index, leaf in enumerate(opened.leaves) for piece in leaf.pieces}
    placed = 0

    def progress(done: int, total: int) -> None:
        nonlocal placed
        placed += 1
        with reader.lock:
            ahead = max(of_leaf[name] for name in reader.started) + 1 - placed
        assert ahead <= (os.cpu_count() or 1) + 1

    load_leaves(opened, progress)
    assert placed == len(opened.leaves)


def test_a_failure_stops_the_reading():
    opened, reader = checkpoint(num_layers=40, fail_at="model.layers.1.mlp.down_proj.weight")
    with pytest.raises(ModelError, match="cannot read model"):
        load_leaves(opened)
    assert len(reader.started) < len(reader.tensors) / 2
