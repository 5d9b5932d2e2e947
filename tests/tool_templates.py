"""Chat templates that take tools, written for tests in the manner of two families, and the tools of the tests."""

from __future__ import annotations

from typing import Any

QWEN_LIKE = """{%- if tools %}
    {{- '<|im_start|>system\\nSignatures of functions:\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
    {{- '\\n</tools>\\nA call is <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA_LIKE = """{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if tools is not none %}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.\\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{ raise_exception('only single tool-calls at once') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- 'assistant: {"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot|>' }}
    {%- elif message.role == 'tool' %}
        {{- 'ipython: ' + (message.content | tojson) + '<|eot|>' }}
    {%- else %}
        {{- message.role + ': ' + message.content + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""

# Short enough for the scripted model, whose context is 128 bytes.
SHORT = {
    "hermes": "{# <tool_call> #}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}:{{ messages[-1].content }}",
    "llama": "{# <|python_tag|> #}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}:{{ messages[-1].content }}",
    "unknown": "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}:{{ messages[-1].content }}",
    "without": "{{ messages[-1].content }}",
}


def tool(name: str, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    """A tool as clients send it."""
    function = {"name": name, "description": f"What {name} does", **fields}
    return {"type": "function", "function": function | ({} if parameters is None else {"parameters": parameters})}


WEATHER = tool(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
CLOCK = tool("clock")
