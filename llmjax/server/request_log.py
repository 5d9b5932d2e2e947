"""The log's line of one exchange: who asked, what became of it, how many tokens, where the time went. No text of prompt or output
unless the server was told to log it (`ServerConfig.log_prompts`). Pure: makes texts and fields, writes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from llmjax.engine.outputs import RequestOutput
from llmjax.server.protocol import ApiRequest
from llmjax.telemetry.timings import SEGMENTS


def answer_fields(request: ApiRequest, outputs: Collection[RequestOutput], *, prompts: bool) -> dict[str, Any]:
    """What an answer was, as far as it came: fields for a log. `prompts`: with the texts."""
    choices = [choice for output in outputs for choice in output.outputs]
    fields: dict[str, Any] = {
        "stream": request.stream,
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "cached_tokens": sum(output.num_cached_tokens for output in outputs),
        "output_tokens": sum(len(choice.token_ids) for choice in choices),
        "finish_reasons": [choice.finish_reason for choice in choices],
        "preemptions": sum(output.num_preemptions for output in outputs),
    }
    if drafted := [output.speculation for output in outputs if output.speculation is not None]:
        fields |= {"drafted_tokens": sum(one.drafted for one in drafted), "accepted_tokens": sum(one.accepted for one in drafted)}
    slowest = max((o.timings for o in outputs if o.timings is not None), key=lambda timings: timings.total_ns, default=None)
    if slowest is not None:
        fields |= {f"{segment}_s": round(slowest.seconds(segment), 6) for segment in SEGMENTS}
        if slowest.first_token_ns is not None:
            fields["first_token_s"] = round(slowest.first_token_ns * 1e-9, 6)
    if prompts:
        asked = request.messages if request.endpoint == "chat" else list(request.prompts)
        fields |= {"prompt": asked, "output": [choice.text for choice in choices]}
    return fields


def line(fields: Mapping[str, Any]) -> str:
    """An exchange in words; `fields` are `id`, `method`, `route`, `status`, `seconds`, and `answer_fields` if there are any."""
    text = "{id} {method} {route} {status} {seconds:.3f} s".format(**fields)
    if "output_tokens" in fields:
        text += ", {prompt_tokens} + {output_tokens} tokens ({cached_tokens} cached)".format(**fields)
        text += f", {' '.join(dict.fromkeys(reason or 'unfinished' for reason in fields['finish_reasons'])) or 'unfinished'}"
        if "drafted_tokens" in fields:
            text += ", {accepted_tokens} of {drafted_tokens} drafted tokens accepted".format(**fields)
        if "first_token_s" in fields:
            text += ", first token {first_token_s:.3f} s".format(**fields)
    return text
