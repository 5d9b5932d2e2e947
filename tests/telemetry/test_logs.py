"""What is written to the log, in both forms."""

from __future__ import annotations

import io
import json
import logging

from llmjax.telemetry.logs import configure_logging


def test_json_has_one_object_a_record_and_the_fields_of_those_that_have_some() -> None:
    out = io.StringIO()
    configure_logging("json", verbose=True, stream=out)
    log = logging.getLogger("llmjax.some.where")
    log.info("two\nlines of %s", "é")
    log.info("for people", extra={"event": "request", "fields": {"id": "a", "seconds": 0.5, "none": None}})
    try:
        raise ValueError("boom")
    except ValueError as error:
        log.error("it failed", exc_info=error)
    first, second, third = map(json.loads, out.getvalue().splitlines())
    assert first["time"] > 1e9
    del first["time"]
    assert first == {"event": "log", "level": "info", "logger": "llmjax.some.where", "message": "two\nlines of é"}
    assert (second["event"], second["id"], second["seconds"], second["none"]) == ("request", "a", 0.5, None)
    assert "message" not in second
    assert "ValueError: boom" in third["traceback"]


def test_text_has_the_message_and_says_what_is_wrong() -> None:
    out = io.StringIO()
    configure_logging("text", stream=out)
    log = logging.getLogger("llmjax.some.where")
    log.info("not told")
    log.warning("told")
    assert out.getvalue() == "warning: told\n"
    configure_logging("text", verbose=True, stream=out)
    log.info("for people", extra={"event": "request", "fields": {"id": "a"}})
    assert out.getvalue() == "warning: told\nfor people\n"
