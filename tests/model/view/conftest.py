"""One headless Chromium for all tests of the page, and traces of a simulated model."""

import json
import shutil
import threading
from contextlib import contextmanager

import pytest

from model.control.pool_frames import FrameLog
from model.view import Trace, make_server
from tests.model.view.test_pool_frames import Run

WORDS = {0: "<img src=x onerror=hacked()>", 1: "\n", 2: "</div><script>hacked()</script>", 3: "é"}


CELL_COLOURS = """
const map = document.getElementById("map");
const { size, columns, cells } = Object.fromEntries(
  Object.entries(map.dataset).map(([name, text]) => [name, Number(text)]));
const ratio = window.devicePixelRatio;
const ink = map.getContext("2d");
return Array.from({ length: cells }, (_, cell) => Array.from(ink.getImageData(
  ((cell % columns) * size + 4) * ratio, (Math.floor(cell / columns) * size + 4) * ratio, 1, 1)
  .data));
"""


def kind(colour):
    """Grey, nearly the background, or a colour."""
    *rgb, alpha = colour
    if max(rgb) - min(rgb) > 24:
        return "held"
    return "cached" if alpha == 255 and 60 < sum(rgb) / 3 < 225 else "empty"


def simulated_trace(seed=4, num_steps=40, num_blocks=24):
    """A trace file's content as `--trace` writes it, of a simulated model; texts are hostile."""
    log = FrameLog()
    run = Run(seed, lambda: log.add(run.frames.look(len(log.frames) / 10)), num_blocks)
    for _ in range(num_steps):
        run.step()
    for request in run.scheduler.running + run.scheduler.waiting:
        run.scheduler.abort(request)
    run.look()
    record = {
        **run.frames.head(),
        "frames": [frame.document() for frame in log.frames],
        "texts": {str(request.request_id): request.tokens.tolist() for request in run.requests},
        "words": {str(token): text for token, text in WORDS.items()},
    }
    return {"traceEvents": [], "kvcore": record}


@contextmanager
def shown(document, name="trace.json"):
    """Serve a trace as `python -m model.view` does; its address."""
    with make_server(Trace(name, json.dumps(document).encode()), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="session")
def chromium():
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    options.add_argument("--window-size=1200,900")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    started.set_script_timeout(20)
    started.set_page_load_timeout(20)
    yield started
    started.quit()


class Page:
    """What a user sees and does."""

    def __init__(self, driver):
        self.driver = driver

    def open(self, url):
        self.driver.get_log("browser")  # what was said before is no news
        self.driver.get(url)

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def find(self, element_id):
        return self.driver.find_element("id", element_id)

    def text(self, element_id):
        return self.run("return document.getElementById(arguments[0]).textContent", element_id)

    def is_shown(self, element_id):
        return self.run("return !document.getElementById(arguments[0]).hidden", element_id)

    def wait_for(self, condition):
        """Wait until a script's value is true; what it is."""
        return self.driver.execute_async_script(
            "const [done] = arguments;"
            "const look = () => {"
            f"  const value = {condition};"
            "  if (value) done(value); else requestAnimationFrame(look);"
            "};"
            "look();"
        )

    def show_frame(self, index, time_s):
        self.run(
            "const s = document.getElementById('slider'); s.value = arguments[0];"
            "s.dispatchEvent(new Event('input'))",
            time_s,
        )
        self.wait_for(f"document.documentElement.dataset.frame === '{index}'")

    def faults(self):
        """What the browser's console has said since the page was opened."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def press(self, element_id, *keys):
        self.find(element_id).send_keys(*keys)


@pytest.fixture
def page(chromium):
    """A page; what is told by its console is a failure."""
    made = Page(chromium)
    yield made
    # That reading pixels is slow is said of the tests that do.
    said = [text for text in made.faults() if "willReadFrequently" not in text]
    made.open("about:blank")
    assert said == []
