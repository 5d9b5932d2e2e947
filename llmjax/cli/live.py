"""`inspect --live`: where the memory of a running server is, asked of its `/memory` and shown as tables."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from llmjax.cli.terminal import as_json, table
from llmjax.errors import ConfigError, LlmjaxError
from llmjax.server.key_file import read_key_file

LARGEST = 20
"""Requests that are shown, those with most pages first."""


def show_memory(url: str, api_key_file: Path | None, *, to_json: bool) -> None:
    """Ask the server and show what it says. Raises `ConfigError` for a URL or key file that cannot be used, `LlmjaxError` when no
    llmjax server answers."""
    found = _ask(url, None if api_key_file is None else read_key_file(api_key_file)[0])
    if to_json:
        typer.echo(as_json(found))
        return
    try:
        totals, owners = _totals(found), _owners(found["pages"])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise LlmjaxError(f"{url} answers, but not as this version of llmjax does ({type(error).__name__}: {error})") from None
    table(("memory", ""), totals)
    table(("request", "pages", "shared", "youngest", "oldest"), owners[:LARGEST])
    if len(owners) > LARGEST:
        typer.echo(f"and {len(owners) - LARGEST} requests with fewer pages; ages are in launches")


def _totals(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    device, page = found["device"], found["page_bytes"]
    most = max((use["holders"] for use in found["pages"]), default=0)
    pages = [
        ("pages", f"{found['num_pages']} of {found['page_size']} tokens, {_size(page)} each"),
        ("held", f"{found['num_held']}, {found['num_shared']} of them by several, by {most} at most"),
        ("kept for their prefix", str(found["num_kept"])),
        ("empty", str(found["num_empty"])),
        ("launches", str(found["step"])),
    ]
    return pages + [(name, "not told" if value is None else _size(value)) for name, value in device.items()]


def _owners(pages: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A line for each request: its pages, those that others hold too, and the ages of the newest and the oldest in launches."""
    held: dict[str, list[Mapping[str, Any]]] = {}
    for use in pages:
        for owner in use["owners"]:
            held.setdefault(owner, []).append(use)
    lines = []
    for owner, uses in sorted(held.items(), key=lambda item: -len(item[1])):
        ages = [int(use["age"]) for use in uses]
        counts = len(uses), sum(use["holders"] > 1 for use in uses), min(ages), max(ages)
        lines.append((owner, *map(str, counts)))
    return lines


def _ask(url: str, key: str | None) -> dict[str, Any]:
    from llmjax.loadtest.http_get import get

    try:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        port, host = parts.port, parts.hostname
    except ValueError as error:
        raise ConfigError(f"{url} is no URL: {error}") from None
    if parts.scheme not in ("http", "https") or host is None or "@" in parts.netloc:
        raise ConfigError("--live takes the URL of a server, such as http://localhost:8000, without a user in it")
    path = parts.path.rstrip("/").removesuffix("/v1") + "/memory"
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    status, body = get(url, secure=parts.scheme == "https", host=host, port=port, path=path, headers=headers)
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if status == 200 and isinstance(found, dict):
        return found
    told = found.get("error") if isinstance(found, dict) else None
    reason = told.get("message") if isinstance(told, dict) else f"{body[:80]!r}"
    raise LlmjaxError(f"{url} answers {status} to {path}: {reason}")


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
