"""A chat template with tools in the form of Qwen's, two tools, and what calls them."""

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or () %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{%- if not loop.last or not continue_final_message %}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if reasoning_effort == "high" %}<think>
{% endif %}{% endif %}"""
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": NUMBER, "b": {"$ref": "#/$defs/number"}},
            "required": ["a", "b"],
            "additionalProperties": False,
            "$defs": {"number": NUMBER},
        },
    },
}
STRICT = {"type": "function", "function": {**ADD["function"], "strict": True}}
"""The same; vLLM demands the schema of no other tool."""

NOW = {"type": "function", "function": {"name": "now"}}
HELLO = [{"role": "user", "content": "What is 3 + 4?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def guide(text):
    """The field of a request, vLLM's and ours, by which a model writes this text."""
    return {"structured_outputs": {"choice": [text]}}
