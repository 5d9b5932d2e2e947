"""The file of a server's keys, as the server and whoever asks it read it."""

from __future__ import annotations

from pathlib import Path

from llmjax.errors import ConfigError


def read_key_file(file: str | Path) -> list[str]:
    """The keys, in order, at least one: one a line, and what follows a "#" is a remark. Raises `ConfigError` for a file that
    cannot be read, or holds none."""
    try:
        lines = Path(file).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {file} cannot be read: {error}") from None
    keys = [key for line in lines if (key := line.partition("#")[0].strip())]
    if not keys:
        raise ConfigError(f"the key file {file} holds no key: write one a line")
    return keys
