"""Images in chats: by data: URL, or fetched from public hosts where that is allowed."""

import base64
import http.server
import io
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from PIL.PngImagePlugin import PngInfo

import backends
from model.async_engine import AsyncEngine
from model.control import images
from model.control.config import EngineConfig
from model.control.images import data_of
from model.engine import Engine
from model.errors import InvalidArgumentError
from model.load.loader import load_model
from model.serve import image_urls
from model.serve.config import ServeConfig
from tests.hang import HANG_S
from tests.model import vision
from tests.model.serve.conftest import Served

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}assistant:"
)


def data_url(image, about=None):
    out = io.BytesIO()
    image.save(out, "PNG", pnginfo=about)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def asked(*parts, **more):
    content = [
        {"type": "text", "text": part}
        if not part.startswith(("data:", "http"))
        else {"type": "image_url", "image_url": {"url": part, "detail": "auto"}}
        for part in parts
    ]
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more}


@pytest.fixture(scope="module")
def engine_maker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    vision.save("Qwen2_5_VLConfig", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    cpu = backends.get_backend("numba")
    model = load_model(str(folder), cpu.device)
    return lambda: Engine(model, cpu, EngineConfig(num_blocks=200, block_size=4, max_images=3))


@pytest.fixture(scope="module")
def seeing(engine_maker):
    config = ServeConfig(port=0, served_model_name="seeing", allow_image_urls=True)
    with Served(AsyncEngine(engine_maker), config) as running:
        yield running


@pytest.fixture
def client(seeing):
    with httpx.Client(base_url=seeing.url, timeout=HANG_S) as one:
        yield one


PATH = "/v1/chat/completions"
FIRST, SECOND = data_url(vision.FIRST), data_url(vision.SECOND)
COMMENT = PngInfo()
COMMENT.add_text("Comment", "x" * (2 << 20), zip=True)
BOMB = data_url(vision.FIRST, COMMENT)  # a text that is much longer than its file


def test_an_image_stands_where_its_part_does_and_the_same_one_hits(client, seeing, engine_maker):
    body = asked("Who is ", FIRST, " beside ", SECOND, "?")
    once = client.post(PATH, json=body).json()
    engine = engine_maker()
    wrapped = "user:Who is # beside #?assistant:".replace("#", "<|vision_start|>#<|vision_end|>")
    params = vision.SamplingParams(max_tokens=6, ignore_eos=True)
    tokens, images = engine.model.images.encode(
        wrapped.replace("#", engine.model.images.mark),
        [vision.FIRST, vision.SECOND],
        engine.config,
        adds_special_tokens=False,
    )
    [request] = engine.submit(vision.Submission(tokens, params, images=images))
    while engine.has_unfinished:
        engine.step()
    wanted = engine.model.codec.decode(request.output_tokens)
    assert once["choices"][0]["message"]["content"] == wanted
    assert once["usage"]["prompt_tokens"] == len(tokens)
    runs = seeing.call(lambda engine: engine.images.num_runs)
    again = client.post(PATH, json=body).json()
    assert again["choices"] == once["choices"]
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == len(tokens) // 4 * 4
    assert seeing.call(lambda engine: engine.images.num_runs) == runs
    counted = client.post("/tokenize", json={"messages": body["messages"]}).json()
    assert counted["tokens"] == tokens


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([{"type": "input_audio", "input_audio": {}}], "text, got 'input_audio'"),
        ([{"type": "video_url", "video_url": {"url": "x"}}], "text, got 'video_url'"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png,abc"}}], "wanted data:image"),
        ([{"type": "image_url", "image_url": {"url": "data:;base64,a"}}], "is not base64"),
        ([{"type": "image_url", "image_url": {"url": "data:;base64,QUJD"}}], "wanted one of PNG"),
        ([{"type": "image_url", "image_url": {"url": BOMB}}], "image: Decompressed data too large"),
        ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], "http or https URL"),
        ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a"}}], "a public host"),
        ([{"type": "image_url", "image_url": {"url": FIRST}}] * 4, "at most 3 of them"),
    ],
)
def test_wrong_parts_are_one_line_and_harm_no_other_request(client, parts, says):
    good = asked("Who is ", FIRST)
    bad = good | {"messages": [{"role": "user", "content": parts}]}
    with ThreadPoolExecutor(2) as pool:
        fine, refused = pool.map(lambda body: client.post(PATH, json=body), (good, bad))
    assert fine.status_code == 200
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert says in message
    assert "\n" not in message


def test_a_model_of_text_refuses_images_and_urls_are_not_fetched_unless_allowed(http):
    for url, says in ((FIRST, "reads text alone"), ("http://example.org/a", "--allow-image-urls")):
        answer = http.post(PATH, json=asked("Who is ", url))
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]


# What is fetched.


class _Files(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        path = self.path
        if path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", path.removeprefix("/to/"))
            self.end_headers()
            return
        self.send_response(404 if path == "/none" else 200)
        self.end_headers()
        self.wfile.write(b"x" * 300)
        if path == "/slow":
            self.wfile.flush()
            self.server.released.wait(HANG_S)

    def log_message(self, *_):
        """Nothing."""


@pytest.fixture
def files(monkeypatch):
    """A host that counts as public, on this machine."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Files)
    server.released = threading.Event()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    resolve = socket.getaddrinfo
    names = {"files.example": "127.0.0.1", "home.example": "10.0.0.7"}

    def resolved(host, *args, **how):
        return resolve(names.get(host, host), *args, **how)

    is_public = image_urls.is_public
    monkeypatch.setattr(image_urls, "is_public", lambda ip: ip == "127.0.0.1" or is_public(ip))
    monkeypatch.setattr(image_urls.socket, "getaddrinfo", resolved)
    yield f"http://files.example:{server.server_port}"
    server.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_bytes_are_fetched_also_behind_redirects(files):
    assert image_urls.fetch(f"{files}/a", 300, 5) == b"x" * 300
    assert image_urls.fetch(f"{files}/to/{files}/a?b", 300, 5) == b"x" * 300
    assert image_urls.fetch(f"{files}/to//a", 300, 5) == b"x" * 300


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/none", "wanted status 200, got 404"),
        ("/a", r"299 bytes \(--max-image-bytes\), got more"),
        ("/to/" * 4 + "/a", "at most 3 redirects"),
        ("/to/http://home.example/", "a public host, got 'home.example'"),
        ("/to/http://169.254.169.254/latest", "a public host"),
        ("/to/file:///etc/passwd", "an http or https URL"),
        ("/to/http://[x", "cannot fetch"),
        ("/slow", r"no time is left \(--image-url-timeout-s\)"),
    ],
)
def test_what_is_too_much_or_not_public_is_refused(files, path, says):
    with pytest.raises(InvalidArgumentError, match=says):
        image_urls.fetch(files + path, 299 if path == "/a" else 300, 0.3)


def test_no_time_is_left_behind_a_handshake_that_took_it(files, monkeypatch):
    class Slow:
        def wrap_socket(self, connection, server_hostname):
            shaken = socket.socket(fileno=connection.detach())
            threading.Event().wait(0.3)
            return shaken

    monkeypatch.setattr(image_urls.ssl, "create_default_context", Slow)
    with pytest.raises(InvalidArgumentError, match="no time is left"):
        image_urls.fetch(files.replace("http", "https") + "/a", 300, 0.2)


def test_a_connection_goes_to_the_address_that_was_checked(monkeypatch):
    """A name server that answers otherwise the second time (DNS rebinding) changes nothing."""
    answers = ["93.184.215.14", "127.0.0.1"]
    connected = []

    def resolved(host, port, **_):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answers.pop(0), port))]

    def refused(address, timeout):
        connected.append(address)
        raise OSError("refused")

    monkeypatch.setattr(image_urls.socket, "getaddrinfo", resolved)
    monkeypatch.setattr(image_urls.socket, "create_connection", refused)
    with pytest.raises(InvalidArgumentError, match="cannot fetch"):
        image_urls.fetch("http://changing.example/", 9, 1)
    assert connected == [("93.184.215.14", 80)]
    with pytest.raises(InvalidArgumentError, match="a public host"):
        image_urls.fetch("http://changing.example/", 9, 1)
    assert len(connected) == 1


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
        *("0.0.0.0", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1"),  # noqa: S104
        *("::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "ff02::1"),
        *("::127.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b:1::a00:1", "fec0::1"),
    ],
)
def test_addresses_that_are_not_of_the_internet(address):
    assert not image_urls.is_public(address)


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"])
def test_addresses_of_the_internet(address):
    assert image_urls.is_public(address)


@pytest.mark.parametrize(
    "image", [b"\x89PNG" + bytes(3000), bytes(3_000_000), b"%PDF-1.7" + bytes(9000)]
)
def test_a_model_of_text_refuses_images_without_decoding_them(http, monkeypatch, image):
    monkeypatch.setattr("model.serve.conversation.data_of", None)
    url = "data:image/png;base64," + base64.b64encode(image).decode()
    if len(url) > 1 << 20:  # the limit of this server's bodies
        url = url[: 1 << 19]
    answer = http.post(PATH, json=asked("Who is ", url))
    assert "reads text alone" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("image", "says"),
    [
        (b"\x89PNG" + bytes(3000), "wanted at most 1,000 bytes"),
        (b"\xff\xd8" + bytes(1020), "wanted at most 1,000 bytes"),
        (b"%PDF-1.7" + bytes(600), "wanted one of PNG"),
        (b"<svg xmlns=" + bytes(600), "wanted one of PNG"),
        (bytes(600), "wanted one of PNG"),
    ],
)
def test_images_that_are_too_large_or_none_are_refused_by_their_beginning(monkeypatch, image, says):
    decoded = []
    monkeypatch.setattr(images, "data_of", lambda url: decoded.append(url) or data_of(url))
    url = "data:image/png;base64," + base64.b64encode(image).decode()
    with pytest.raises(InvalidArgumentError, match=says):
        images.check_data(url, 1000)
    assert all(len(each) < 100 for each in decoded)
