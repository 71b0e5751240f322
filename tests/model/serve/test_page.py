"""The page on serving is true: its examples run, and it names every path and field."""

import re
from pathlib import Path

import pytest

from model.serve.protocol import ChatRequest, CompletionRequest

DOCS = Path(__file__).parents[3] / "docs" / "how-to"
PAGE, AGENTS = ((DOCS / name).read_text(encoding="utf-8") for name in ("serve.md", "agents.md"))
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE + AGENTS, re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(served, capsys, number):
    source = EXAMPLES[number].replace("http://localhost:8000", served.url)
    exec(compile(source, "serve.md", "exec"), {})  # noqa: S102  # our own page
    assert len(capsys.readouterr().out) > 8


def test_there_are_examples_of_the_client_and_of_both_classes():
    assert [name in "".join(EXAMPLES) for name in ("OpenAI(", "LLM(", "AsyncEngine(")] == [True] * 3


def test_every_path_is_named(http):
    paths = set(http.get("/openapi.json").json()["paths"])
    assert http.head("/openapi.json").status_code == 200
    assert {path for path in paths if f"{path}`" not in PAGE} == set()


def test_every_field_is_named():
    quiet = {
        "messages", "prompt", "store", "functions", "function_call", "modalities", "audio",
        "prediction", "verbosity", "web_search_options", "best_of", "service_tier", "metadata",
        "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    }  # fmt: skip  # the prompt's own names; what is refused or means nothing
    for request in (CompletionRequest, ChatRequest):
        assert {name for name in request.model_fields if f"`{name}`" not in PAGE} <= quiet
