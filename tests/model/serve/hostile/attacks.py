"""Requests of a client that means harm: strategies of every route, field and way to send.

An attack is drawn small and made large when it is sent. What a polite client sends under load is
here too: `POLITE`.
"""

import base64
import io
import json
import struct
import zlib
from functools import partial
from typing import NamedTuple

from hypothesis import strategies as st
from PIL import Image

from tests.model.serve.test_fuzz import JSON, ROUTES, bodies

KEY, POLITE_KEY = "hostile", "polite"
PAIR = "\N{GRINNING FACE}"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "x"}]
VALID = {
    TEXT: {"prompt": "A tuple is", "max_tokens": 3},
    CHAT: {"messages": USER, "max_tokens": 3},
    "/v1/responses": {"input": "x", "max_output_tokens": 3},
    "/v1/messages": {"messages": USER, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": USER},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "b"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}


class Attack(NamedTuple):
    """What is sent, and what the client does then.

    Attributes:
        kind: of attack.
        make: makes what is sent: bytes, and seconds to wait between them.
        then: "read" the answer, "leave" after its first bytes, "reset" at once, or "hold": read
            nothing for a while.
    """

    kind: str
    make: partial
    then: str = "read"


def raw(method, path, body=b"", headers=(), *, length=None, key=KEY):
    """A request as it is sent; its connection ends with it."""
    told = {"Host": "x", "Connection": "close", "Content-Type": "application/json"}
    if key is not None:
        told["Authorization"] = f"Bearer {key}"
    told["Content-Length"] = len(body) if length is None else length
    told |= dict(headers)
    lines = [f"{method} {path} HTTP/1.1".encode()]
    lines += [f"{name}: {value}".encode() for name, value in told.items() if value is not None]
    return b"\r\n".join([*lines, b"", body])


def post(path, fields, headers=()):
    return [raw("POST", path, json.dumps(fields).encode(), headers)]


OBJECT = '{"":'


def deep(depth, open_="[", close="]"):
    """JSON so deep that no text of it is written by `json`."""
    return f"{open_ * depth}1{close * depth}"


def damaged(path, how, place):
    """The text of a request that is right, damaged."""
    text = json.dumps(VALID[path] | {"temperature": 1})
    at = int(place * len(text))
    made = {
        "cut": text[:at].encode(),
        "tail": (text + "]}" * 9).encode(),
        "twice": f"{text[:-1]}, {text[1:]}".encode(),
        "NaN": text.replace("1}", "NaN}").encode(),
        "Infinity": text.replace("1}", "-Infinity}").encode(),
        "1e999": text.replace("1}", "1e999}").encode(),
        "digits": text.replace("1}", "9" * 100_000 + "}").encode(),
        "byte": text[:at].encode() + b"\xff\xc0\x80" + text[at:].encode(),
        "zero": text[:at].encode() + b"\0" + text[at:].encode(),
        "BOM": b"\xef\xbb\xbf" + text.encode(),
        "UTF-16": text.encode("utf-16"),
        "UTF-32": text.encode("utf-32-le"),
        "comment": f"/* */{text}".encode(),
        "quotes": text.replace('"', "'").encode(),
        "lists": f'{text[:-1]}, "stop": {deep(100_000)}}}'.encode(),
        "objects": f'{text[:-1]}, "stop": {deep(50_000, OBJECT, "}")}}}'.encode(),
        "open": (text[:-1] + ', "x": ' + "[" * 1_000_000).encode(),
        "keys": (text[:-1] + "".join(f',"k{n}":0' for n in range(50_000)) + "}").encode(),
        "key": (text[:-1] + f', "{"k" * 500_000}": 0}}').encode(),
        "space": text.encode() + b" " * 2_000_000,
        "escapes": (text[:-1] + ', "user": "' + "\\ud83d" * 100_000 + '"}').encode(),
        "empty": b"",
    }  # fmt: skip
    return [raw("POST", path, made[how])]


DAMAGES = (
    "cut", "tail", "twice", "NaN", "Infinity", "1e999", "digits", "byte", "zero", "BOM", "UTF-16",
    "UTF-32", "comment", "quotes", "lists", "objects", "open", "keys", "key", "space", "escapes",
    "empty",
)  # fmt: skip
EXTREMES = {
    "huge": 10**400, "minus": -(2**63), "many": 2**63, "tiny": 5e-324, "large": 1.7e308,
    "half a pair": "\ud800", "zero bytes": "\0" * 9, "emoji": PAIR * 40,
    "overrides": "\u202e\u2066\ufeff",
    "names": "__proto__", "path": "../../../../etc/passwd", "format": "%s%n{0.__class__}{{7*7}}",
    "lines": "a\r\nSet-Cookie: x", "object": {"a": {"b": {"c": [1]}}}, "null": None, "true": True,
    "empty": "", "list": [], "lists": [[[[[[]]]]]], "mixed": [1, "a", None, {}],
}  # fmt: skip
LARGE = {
    "text": partial("a".__mul__, 900_000), "pairs": partial(PAIR.__mul__, 60_000),
    "texts": lambda: ["a"] * 100_000, "numbers": lambda: [7] * 300_000,
    "object": lambda: dict.fromkeys(map(str, range(50_000)), 1), "lists": lambda: [[1]] * 100_000,
}  # fmt: skip


def with_field(path, name, value, *, is_large):
    return post(path, VALID[path] | {name: LARGE[value]() if is_large else EXTREMES[value]})


REGEXES = (
    "(a{1,1000}){1,1000}", "((a|b|c|ab|bc)*d){200}", "(.*a){60}", "(a?){500}a{500}", "(x+x+)+y",
    r"[\s\S]{1,100000}", r"\p{L}{1,9999}", "((((((((((a*)*)*)*)*)*)*)*)*)*)", "a{99999999}",
    "(?i)" + "é" * 5000,
    "(?=a)b", r"(a)\1", "[^\\s\\S]", "(" * 4000 + ")" * 4000, "|".join(["ab*c"] * 9000), "", "\\",
    ".{0,300}x.{0,300}y.{0,300}z", "(a|a|a|a|a|a){1,300}", "[" + "a-z" * 2000 + "]{1,400}",
)  # fmt: skip
LARKS = (
    'start: e\ne: e e | "a" | e e e', "start: start", 'start: "a" start', "start: /(x+x+)+y/",
    "start:",
    'start: a{1,100000}\na: "x" | "y"', "start: %json {}", 'start: %json {"type": 5}',
    "start: <[1-9999999]>",
    "start: " + " | ".join(f'"{n}" a' for n in range(3000)) + "\na: /.*/", "%import x.y",
    "start: b\n" * 2000,
    "start[capture]: /.{0,9999}/", 'start: (("a"?)~1..500)~1..500', "start: a\n" + "".join(
        f"a{n or ''}: a{n + 1} a{n + 1}\n" for n in range(30)) + 'a30: "x"',
)  # fmt: skip


def _chain(width, count):
    """References that double at each step."""
    made = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * width} for n in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": made | {f"d{count}": {"type": "string"}}}


def _product(count, size):
    each = {f"p{n}": {"type": "string", "maxLength": size} for n in range(count)}
    return {"type": "object", "properties": each}


SCHEMAS = {
    "chain": partial(_chain, 2, 30), "wide": partial(_chain, 40, 20),
    "product": partial(_product, 900, 9),
    "any": lambda: {"anyOf": [_product(90, 5) for _ in range(20)]},
    "itself": lambda: {"$ref": "#"}, "elsewhere": lambda: {"$ref": "http://127.0.0.1:1/x"},
    "file": lambda: {"$ref": "file:///etc/passwd"},
    "long": lambda: {"type": "string", "minLength": 10**9},
    "items": lambda: {"type": "array", "minItems": 10**7, "items": {"type": "integer"}},
    "pattern": lambda: {"type": "string", "pattern": "(a{1,1000}){1,1000}"},
    "patterns": lambda: {"type": "object", "patternProperties": {"(.*a){50}": {},
    ".*": {"$ref": "#"}}},
    "steps": lambda: {"type": "number", "multipleOf": 1e-300},
    "bounds": lambda: {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    "enum": lambda: {"enum": [str(n) * 20 for n in range(1000)]}, "nothing": lambda: {"enum": []},
    "not": lambda: {"not": {}}, "all": lambda: {"allOf": [_product(30, 4)] * 200},
    "unknown": lambda: {"type": ["x", 5]}, "one": lambda: {"oneOf": [{"type": "string"}] * 300},
    "nest": lambda: json.loads('{"items":' * 400 + "{}" + "}" * 400),
    "key": lambda: {"properties": {"\0\ud800" * 9: {}}},
    "format": lambda: {"type": "string", "format": "x" * 9999},
}  # fmt: skip


def guided(path, form, which, streams):
    """A demanded form that explodes."""
    body = VALID[path] | {"stream": streams} | {
        "regex": lambda: {"guided_regex": REGEXES[which % len(REGEXES)]},
        "lark": lambda: {"guided_grammar": LARKS[which % len(LARKS)]},
        "choice": lambda: {"guided_choice": [PAIR * (n % 60 + 1) for n in range(1000)]},
        "schema": lambda: {"guided_json": [*SCHEMAS.values()][which % len(SCHEMAS)]()},
        "format": lambda: {"response_format": {"type": "json_schema", "json_schema": {
            "schema": [*SCHEMAS.values()][which % len(SCHEMAS)]()}}},
        "structured": lambda: {"structured_outputs": {"regex": REGEXES[which % len(REGEXES)]}},
    }[form]()  # fmt: skip
    return post(path, body)


def with_tools(path, which, count, choice, streams):
    """Tools whose schemas explode, or that are many."""
    schema, body = [*SCHEMAS.values()][which % len(SCHEMAS)](), VALID[path] | {"stream": streams}
    names = [f"f{number}" for number in range(count)]
    if path == CHAT:
        tools = [
            {"type": "function", "function": {"name": name, "parameters": schema}} for name in names
        ]
        named = {"type": "function", "function": {"name": "f0"}}
    elif path == "/v1/responses":
        tools = [{"type": "function", "name": name, "parameters": schema} for name in names]
        named = {"type": "function", "name": "f0"}
    else:
        tools, named = (
            [{"name": name, "input_schema": schema} for name in names],
            {"type": "tool", "name": "f0"},
        )
        choice = {"type": {"required": "any"}.get(choice, choice)}
    return post(
        path, body | {"tools": tools, "tool_choice": named if choice == "named" else choice}
    )


def _png(width, height, data):
    def chunk(name, content):
        checked = name + content
        return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + data(chunk) + chunk(b"IEND", b"")


def _idat(size):
    return lambda chunk: chunk(b"IDAT", zlib.compress(b"\0" * size, 9))


def _gif(frames):
    out = io.BytesIO()
    made = [Image.new("L", (32, 32), number % 256) for number in range(frames)]
    made[0].save(out, "GIF", save_all=True, append_images=made[1:])
    return out.getvalue()


IMAGES = {
    "pixels": lambda: _png(60_000, 60_000, _idat(100)),
    "true bomb": lambda: _png(8000, 8000, _idat(8000 * 24_001)),
    "text": lambda: _png(8, 8, lambda chunk: chunk(b"zTXt",
    b"a\0\0" + zlib.compress(b"x" * 50_000_000, 9)) + _idat(200)(chunk)),
    "profile": lambda: _png(8, 8, lambda chunk: chunk(b"iCCP",
    b"a\0\0" + zlib.compress(b"x" * 50_000_000, 9)) + _idat(200)(chunk)),
    "cut": lambda: _png(64, 64, _idat(64 * 193))[:80], "zero": lambda: _png(0, 0, _idat(1)),
    "frames": lambda: _gif(300),
    "thin": lambda: _png(1, 4000, _idat(16_000)), "one": lambda: _png(1, 1, _idat(4)),
    "nothing": lambda: b"",
    "svg": lambda: b'<svg><image href="file:///etc/passwd"/></svg>',
    "eps": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) run\n",
    "text file": lambda: b"a" * 3_000_000,
    "right": lambda: _png(28, 28, _idat(28 * 85)),
}  # fmt: skip


def with_image(which, count, wrong):
    url = f"data:image/png;base64,{base64.b64encode(IMAGES[which]()).decode()}"
    url = {"": url, "no base64": url.replace("base64,", "base64,***"), "no comma": "data:image/png",
           "no type": url.replace("image/png", "")}[wrong]  # fmt: skip
    content = [{"type": "image_url", "image_url": {"url": url}}] * count
    return post(CHAT, VALID[CHAT] | {"messages": [{"role": "user", "content": content}]})


URLS = (
    "http://127.0.0.1:{port}/", "http://localhost:{port}/", "http://[::1]:{port}/",
    "http://0.0.0.0:{port}/", "http://2130706433:{port}/",
    "http://0x7f.1:{port}/", "http://127.1:{port}/x.png", "http://[::ffff:127.0.0.1]:{port}/",
    "http://169.254.169.254/latest/meta-data/",
    "http://a@127.0.0.1:{port}/", "file:///etc/passwd", "ftp://127.0.0.1:{port}/",
    "gopher://127.0.0.1:{port}/_x", "http://127.0.0.1:{port}\\@example.com/",
    "http://[64:ff9b::7f00:1]:{port}/", "http://10.0.0.1/", "http:///x", "http://127.0.0.1:99999/",
    "http://\u2460\u2461\u2466.0.0.1:{port}/", "//127.0.0.1:{port}/",
    "http://127.0.0.1:{port}/\r\nX: y", "http://" + "a" * 5000 + "/", "data:,x", "http://[::1",
    "http://\ud800/",
)  # fmt: skip


def with_url(which, path, port):
    url = URLS[which % len(URLS)].format(port=port)
    part = {
        CHAT: {"type": "image_url", "image_url": {"url": url}},
        "/v1/messages": {"type": "image", "source": {"type": "url", "url": url}},
        "/v1/responses": {"type": "input_image", "image_url": url},
    }[path]
    said = [{"role": "user", "content": [part]}]
    return post(path, VALID[path] | {"input" if path == "/v1/responses" else "messages": said})


PATHS = (
    "../../../etc/passwd", "/etc", "/proc/self/environ", "/dev/zero", "/dev/stdin",
    "/proc/self/fd", "file:///etc/passwd", "", ".", "/",
    "a\0b", "~root", "\ud800", "/" + "a" * 5000, "{folder}/fifo", "{folder}/endless",
    "{folder}/loop", "{folder}/deep", "{folder}/config", "hf://x/y",
)  # fmt: skip


def with_path(which, name, folder):
    path = PATHS[which % len(PATHS)].replace("{folder}", folder)
    return post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})


GETS = (
    "/v1/models/../../etc/passwd", "/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/page/../page.py",
    "/page/..%2f..%2fserve%2fgate.py", "/page/%00",
    "/view/blocks/99999999999999999999999", "/view/blocks/-1", "/view/blocks/x", "/view/blocks/1",
    "/metrics", "/openapi.json", "/health", "/version", "/docs", "/v1/models/" + "a" * 20_000,
    "/v1/models/\u00e9", "/%ff%fe", "//", "/?" + "a=b&" * 5000, "/v1/completions", "*",
    "http://evil/v1/models", "/v1/models?x[]=1", "/page/page.js", "/view/frames", "/.git/config",
    "/admin", "/sleep", "/shutdown",
)  # fmt: skip


def get(which, method, key):
    return [raw(method, GETS[which % len(GETS)], key=key)]


def keyed(key, name):
    """Keys and names of models and clients that are no such."""
    body = json.dumps(VALID[TEXT] | {"model": name, "user": name, "cache_salt": name}).encode()
    return [raw("POST", TEXT, body, key=key)]


def wire(how, path):
    """What no client of HTTP sends."""
    body = json.dumps(VALID[path]).encode()
    right = raw("POST", path, body)
    head = right[: -len(body)]
    chunked = raw("POST", path, headers={"Content-Length": None, "Transfer-Encoding": "chunked"})
    one = b"%x\r\n%s\r\n" % (len(body), body)
    return {
        "half a head": [right[:40], 0.3], "half a body": [right[:-5], 0.3], "no body": [head, 0.2],
        "too long": [raw("POST", path, body, length=len(body) + 50), 0.3],
        "too short": [raw("POST", path, body, length=len(body) - 5)],
        "minus": [raw("POST", path, body, length=-1)],
        "endless": [raw("POST", path, body, length=10**18), 0.2],
        "no number": [raw("POST", path, body, length="1e3")],
        "letters": [raw("POST", path, body, length="\u0661\u0662")],
        "twice": [raw("POST", path, body, headers={"content-length": 3})],
        "both": [raw("POST", path, body, headers={"Transfer-Encoding": "chunked"})],
        "chunks": [chunked, *[b"1\r\n%c\r\n" % byte for byte in body], b"0\r\n\r\n"],
        "chunk without end": [chunked, one, 0.3], "no chunk size": [chunked, b"zz\r\n" + body],
        "large chunk size": [chunked, b"f" * 40 + b"\r\n" + body],
        "chunk extensions": [chunked, b"1;" + b"a" * 200_000 + b"\r\n{\r\n"],
        "trailers": [chunked, one + b"0\r\n" + b"x: y\r\n" * 20_000 + b"\r\n"],
        "slow": [head, *[part for at in range(0, len(body), 12) for part in (body[at : at + 12],
        0.1)]],
        "slow head": [part for at in range(0, len(head), 30) for part in (head[at : at + 30],
        0.1)] + [body],
        "pipelined": [right.replace(b"Connection: close\r\n", b"") * 20 + right],
        "pipelined unread": [right.replace(b"Connection: close\r\n", b"") * 200],
        "headers": [raw("POST", path, body, headers={f"x-{n}": "y" for n in range(2000)})],
        "large headers": [raw("POST", path, body,
        headers={f"x-{n}": "y" * 2000 for n in range(60)})],
        "one header": [raw("POST", path, body, headers={"x": "y" * 60_000})],
        "bare": [right.replace(b"\r\n", b"\n")],
        "header without name": [right.replace(b"Host", b"")],
        "zero in header": [right.replace(b"Host: x", b"Host: \0\xff")],
        "folded": [right.replace(b"Host: x", b"Host: x\r\n y")],
        "other version": [right.replace(b"HTTP/1.1", b"HTTP/9.9")],
        "old": [b"GET /health\r\n\r\n"], "2": [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"],
        "TLS": [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 200],
        "expects": [raw("POST", path, headers={"Expect": "100-continue"}, length=len(body)), 0.1,
        body],
        "upgrade": [raw("GET", "/v1/models", headers={"Upgrade": "websocket",
        "Connection": "Upgrade", "Sec-WebSocket-Key": "eA==", "Sec-WebSocket-Version": "13"}), 0.3],
        "type": [raw("POST", path, body, headers={"Content-Type": "text/plain"})],
        "form": [raw("POST", path, b"--a\r\n" * 5000,
        headers={"Content-Type": "multipart/form-data; boundary=a"})],
        "gzip": [raw("POST", path, zlib.compress(body), headers={"Content-Encoding": "gzip"})],
        "charset": [raw("POST", path, body,
        headers={"Content-Type": "application/json; charset=utf-7"})],
        "method": [right.replace(b"POST", b"BREW")],
        "long method": [right.replace(b"POST", b"A" * 9000)], "connect": [raw("CONNECT", "x:1")],
        "noise": [bytes(range(256)) * 40], "nothing": [0.2], "lines": [b"\r\n" * 5000],
        "id": [raw("POST", path, body, headers={"X-Request-Id": "a" * 5000})],
        "origin": [raw("OPTIONS", path, headers={"Origin": "\xff",
        "Access-Control-Request-Method": "POST"})],
    }[how]  # fmt: skip


WIRES = tuple(
    name.strip() for name in ["half a head", " half a body", " no body", " too long", " too short",
        " minus", " endless", " no number", " letters", " twice", "\n    both", " chunks",
        " chunk without end", " no chunk size", " large chunk size", " chunk extensions",
        " trailers", " slow", " slow head", " pipelined", "\n    pipelined unread", " headers",
        " large headers", " one header", " bare", " header without name", " zero in header",
        " folded", " other version", " old", "\n    2", " TLS", " expects", " upgrade", " type",
        " form", " gzip", " charset", " method", " long method", " connect", " noise", " nothing",
        " lines", " id", " origin"]
)  # fmt: skip


def volume(which, streams):
    """As much as a request may ask for."""
    path, fields = (
        (TEXT, {"prompt": ["a"] * 250, "max_tokens": 400}), (TEXT, {"n": 128, "max_tokens": 500}),
        (TEXT, {"prompt": [[7] * 1900] * 100, "max_tokens": 1}), (TEXT, {"prompt": ["a"] * 2048}),
        (TEXT, {"prompt": [5] * 1_000_000}), (TEXT, {"prompt": "word " * 700_000}),
        (TEXT, {"logprobs": 20, "max_tokens": 1500, "ignore_eos": True, "n": 8}),
        (TEXT, {"prompt": [9] * 1900, "prompt_logprobs": 20}),
        (TEXT, {"prompt": [9] * 1800, "echo": True, "logprobs": 20}),
        (TEXT, {"max_tokens": 10**9}), (TEXT, {"max_tokens": 1900, "ignore_eos": True}),
        (TEXT, {"stop": ["a" * 60] * 16, "max_tokens": 900, "ignore_eos": True}),
        (TEXT, {"logit_bias": {str(n): 100 for n in range(256)}, "max_tokens": 300,
            "ignore_eos": True}),
        (TEXT, {"temperature": 1e-300}), (TEXT, {"temperature": 1e308}),
        (TEXT, {"repetition_penalty": 1e-300, "max_tokens": 60}),
        (TEXT, {"repetition_penalty": 1e300, "max_tokens": 60}),
        (TEXT, {"presence_penalty": -2, "frequency_penalty": -2, "max_tokens": 900,
            "ignore_eos": True}), (TEXT, {"top_p": 5e-324}), (TEXT, {"min_p": 1.0, "top_k": 1}),
        (TEXT, {"min_tokens": 1900, "max_tokens": 1900}),
        (TEXT, {"priority": -(2**31) + 1, "max_tokens": 900, "ignore_eos": True}),
        (TEXT, {"retain": ["0:2000@255/999999"] * 16}),
        (CHAT, {"messages": USER * 16_000}), (CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 16_000}]}),
        (CHAT, {"n": 64, "logprobs": True, "top_logprobs": 20, "max_tokens": 300}),
        (CHAT, {"chat_template_kwargs": {str(n): [n] * 9 for n in range(1000)}}),
        ("/tokenize", {"prompt": "a b" * 1_000_000}), ("/tokenize", {"prompt": "x" * 3_000_000}),
        ("/detokenize", {"tokens": [5] * 1_000_000}),
        ("/v1/responses", {"input": [{"role": "user", "content": "x"}] * 16_000}),
        ("/v1/messages", {"system": "a " * 1_000_000}),
        ("/v1/messages/count_tokens", {"messages": USER * 16_000}),
    )[which]  # fmt: skip
    extra = {"stream": streams} if path.endswith(("completions", "responses", "messages")) else {}
    return post(path, VALID[path] | extra | fields)


NUM_VOLUMES = 33


@st.composite
def fields(draw):
    path = draw(st.sampled_from([*ROUTES]))
    body = draw(bodies(ROUTES[path][0]))
    return Attack("fields", partial(post, path, body), draw(st.sampled_from(["read", "leave"])))


@st.composite
def extremes(draw):
    path = draw(st.sampled_from([*VALID]))
    known = ROUTES[path][0].model_fields if path in ROUTES else VALID[path]
    name = draw(st.sampled_from([*known]))
    is_large = draw(st.integers(0, 3)) == 0
    value = draw(st.sampled_from([*(LARGE if is_large else EXTREMES)]))
    return Attack("extremes", partial(with_field, path, name, value, is_large=is_large))


def attacks(port, folder):
    """Attacks of every kind.

    Args:
        port: of a listener at home, which no server should connect to.
        folder: what looks like adapters.
    """
    paths, numbers, flags = st.sampled_from([*VALID]), st.integers(0, 9999), st.booleans()
    speaking = st.sampled_from([CHAT, "/v1/responses", "/v1/messages"])
    generating = st.sampled_from([TEXT, CHAT, "/v1/responses", "/v1/messages"])
    ends = st.sampled_from(["read", "read", "leave", "reset", "hold"])
    names = st.one_of(st.text(max_size=30), st.sampled_from(["a" * 5000, "tiny\0", "model/../x"]))
    keys = st.one_of(
        st.text(max_size=40), st.none(), st.just(KEY * 9000), st.just(KEY),
        st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=9).map(KEY.__add__),
    ).map(lambda key: key and key.encode("utf-8", "replace").decode().replace("\n",
        " "))  # fmt: skip
    return st.one_of(
        fields(), fields(), extremes(),
        st.builds(Attack, st.just("damaged"), st.builds(
            partial, st.just(damaged), paths, st.sampled_from(DAMAGES), st.floats(0, 1))),
        st.builds(Attack, st.just("JSON"), st.builds(partial, st.just(post), paths, JSON)),
        st.builds(Attack, st.just("guides"), st.builds(
            partial, st.just(guided), generating,
            st.sampled_from(["regex", "lark", "choice", "schema", "format", "structured"]),
                numbers, flags), ends),
        st.builds(Attack, st.just("tools"), st.builds(
            partial, st.just(with_tools), speaking, numbers, st.sampled_from([1, 1, 3, 200]),
            st.sampled_from(["auto", "none", "required", "named"]), flags), ends),
        st.builds(Attack, st.just("images"), st.builds(
            partial, st.just(with_image), st.sampled_from([*IMAGES]), st.sampled_from([1, 3, 100]),
            st.sampled_from(["", "", "", "no base64", "no comma", "no type"]))),
        st.builds(Attack, st.just("URLs"), st.builds(
            partial, st.just(with_url), numbers, speaking, st.just(port))),
        st.builds(Attack, st.just("paths"), st.builds(
            partial, st.just(with_path), numbers, names, st.just(str(folder)))),
        st.builds(Attack, st.just("other routes"), st.builds(
            partial, st.just(get), numbers, st.sampled_from(["GET", "GET", "HEAD", "DELETE",
                "POST"]), keys),
            st.sampled_from(["read", "leave", "hold"])),
        st.builds(Attack, st.just("keys and names"),
            st.builds(partial, st.just(keyed), keys, names)),
        st.builds(Attack, st.just("wire"), st.builds(
            partial, st.just(wire), st.sampled_from(WIRES), paths), ends),
        st.builds(Attack, st.just("volume"), st.builds(
            partial, st.just(volume), st.integers(0, NUM_VOLUMES - 1), flags), ends),
    )  # fmt: skip


POLITE = st.builds(
    Attack, st.just("polite"),
    st.builds(
        lambda size, first, n, streams: partial(post, TEXT, {
            "prompt": [first, *[7] * size], "max_tokens": 60, "ignore_eos": True, "n": n,
            "stream": streams}),
        st.integers(1, 900), st.integers(10, 250), st.integers(1, 4), st.booleans(),
    ),
)  # fmt: skip
"""Load as it should be: enough that every seat is taken."""
