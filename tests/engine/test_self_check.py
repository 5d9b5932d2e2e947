"""An engine whose kernels compute wrong numbers does not start, and says which kernel it was."""

from __future__ import annotations

import pytest
from tiny_models import CONFIGS, random_params

from llmjax.engine.config import EngineConfig
from llmjax.engine.engine import Engine
from llmjax.errors import BackendError
from pallas_kernels import smoke


def test_wrong_kernels_refuse_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def lie(_: object) -> list[str]:
        raise smoke.WrongNumbers("dense: mosaic differs from xla by 0.7")

    config, params = CONFIGS["llama"], random_params(CONFIGS["llama"])
    options = EngineConfig(max_context=32, max_sequences=1, max_tokens_per_step=16)
    Engine(config, params, None, options)
    monkeypatch.setattr(smoke, "check", lie)
    with pytest.raises(BackendError, match=r"dense: mosaic differs from xla by 0\.7 on .*: its driver"):
        Engine(config, params, None, options)
