"""Conversations of agents, as clients send them, and the prompt that a chat template makes of one.

They go the way of the server: the fields of a request are read, and the codec renders messages.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from model.control.images import take_images
from model.load.codec import HuggingFaceCodec
from model.serve.conversation import conversation
from model.serve.protocol import ChatRequest

IMAGE = "data:image/png;base64,aW1hZ2U="  # no template looks into it
ASK = {"role": "user", "content": "How warm is it in Oslo?"}
THANKS = {"role": "user", "content": "Thanks. And tomorrow?"}
CITY = {"type": "string", "description": "its name"}
PARAMETERS = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Say how warm it is.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": WEATHER}]


def call(number, name="weather", **arguments):
    """A call as the server has told it."""
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def calls(*made, **others):
    return {"role": "assistant", "content": None, "tool_calls": list(made), **others}


def result(number, content):
    return {"role": "tool", "tool_call_id": f"call0000{number}", "content": content}


NESTED = {
    "text": 'Grüße, "Oslo" 雪\n  \ttwo lines',
    "list": [1, 2.5, True, None, {"deep": ["<b>", {}]}],
    "empty": "",
}
PARTS = [{"type": "text", "text": "It is -3 °C, "}, {"type": "text", "text": "and it snows."}]
PICTURE = {"type": "image_url", "image_url": {"url": IMAGE}}
HISTORIES = {
    "chat": [ASK, {"role": "assistant", "content": "It is cold."}, THANKS],
    "system": [{"role": "system", "content": "Be brief."}, ASK],
    "developer": [{"role": "developer", "content": "Be brief."}, ASK],
    "call": [ASK, calls(call(1, city="Oslo")), result(1, "-3")],
    "parallel": [
        ASK, calls(call(1, city="Oslo"), call(2, city="Bergen")), result(1, "-3"), result(2, "4"),
    ],
    "text_and_call": [ASK, calls(call(1, city="Oslo"), content="I look."), result(1, "-3")],
    "reasoning": [
        ASK, calls(call(1, city="Oslo"), reasoning_content="Which tool?"), result(1, "-3"),
    ],
    "loop": [
        {"role": "system", "content": "Be brief."}, ASK,
        calls(call(1, city="Oslo")), result(1, "-3"),
        calls(call(2, "note", city="Oslo"), content=""), result(2, "written"),
        {"role": "assistant", "content": "It is -3 °C."}, THANKS,
    ],
    "nested": [ASK, calls(call(1, "note", **NESTED)), result(1, "ok")],
    "no_arguments": [ASK, calls(call(1)), result(1, "-3")],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "How warm is it"}]},
        calls(call(1, city="Oslo")), result(1, PARTS),
    ],
    "image": [
        {"role": "user", "content": [{"type": "text", "text": "Where is it?"}, PICTURE]},
        calls(call(1, city="Oslo")), result(1, [{"type": "text", "text": "A map: "}, PICTURE]),
    ],
}  # fmt: skip
WITHOUT_TOOLS = {"chat", "system", "developer"}


def codec_of(template):
    """A codec with no words, and this chat template."""
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **ends)
    tokenizer.chat_template = template
    return HuggingFaceCodec(tokenizer, "", None)


def prompt_of(codec, messages, mark="<image>", **fields):
    """The prompt of a request with these messages."""
    asked = ChatRequest.model_validate({"messages": messages, **fields})
    for message in asked.messages:
        for part in message.images:
            part.open(lambda url: b"")
    return codec.render_chat(
        take_images(conversation(asked.messages))[0],
        opens_answer=asked.opens_answer,
        options=asked.template_options,
        image_mark=mark,
    )[0]


def prompts_of(template):
    """The prompt of each history, or the error with which the template refuses it."""
    codec, made = codec_of(template), {}
    for name, messages in HISTORIES.items():
        tools = {} if name in WITHOUT_TOOLS else {"tools": TOOLS}
        try:
            made[name] = prompt_of(codec, messages, **tools)
        except ValueError as error:
            made[name] = f"REFUSED {error}"
    return made


TEMPLATES = Path(__file__).parent / "templates"
STORED = TEMPLATES / "prompts.json"


def templates():
    """The text of each template, by its name."""
    return {path.stem: path.read_text() for path in sorted(TEMPLATES.glob("*.jinja"))}


if __name__ == "__main__":  # stores the prompts, which then have to be read
    made = {name: prompts_of(text) for name, text in templates().items()}
    STORED.write_text(json.dumps(made, ensure_ascii=False, indent=1) + "\n")
