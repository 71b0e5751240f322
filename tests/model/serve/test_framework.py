"""An agent framework, unchanged, with two tools: smolagents runs its own loop over our server."""

import copy

import pytest

from tests.model.serve.calls import guide

smolagents = pytest.importorskip("smolagents", reason="pip install smolagents")
tool = smolagents.tool

CALLS = (
    '{"name": "add", "arguments": {"a": 3, "b": 4}}',
    '{"name": "weather", "arguments": {"city": "Rome"}}',
    '{"name": "final_answer", "arguments": {"answer": "7, and 22 degrees"}}',
)


class Guided(smolagents.OpenAIServerModel):
    """The framework's own client; each of its questions is answered by the next of the calls."""

    def __init__(self, url):
        super().__init__("tiny", api_base=f"{url}/v1", api_key="none", max_tokens=200)
        self.asked = []

    def _prepare_completion_kwargs(self, *given, **kwargs):
        made = super()._prepare_completion_kwargs(*given, **kwargs)
        text = f"<tool_call>\n{CALLS[len(self.asked)]}\n</tool_call>"
        self.asked.append(made)
        return {**made, "tool_choice": "auto", "extra_body": guide(text)}


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_of_a_framework_uses_two_tools_and_answers(agents, streams):
    called = []

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first.
            b: the second.
        """
        called.append(("add", a, b))
        return a + b

    @tool
    def weather(city: str) -> int:
        """How warm it is.

        Args:
            city: where.
        """
        called.append(("weather", city))
        return 22

    templates = copy.deepcopy(smolagents.agents.EMPTY_PROMPT_TEMPLATES)
    model = Guided(agents.url)
    agent = smolagents.ToolCallingAgent(
        [add, weather], model, prompt_templates=templates, max_steps=4, verbosity_level=0,
        stream_outputs=streams,
    )  # fmt: skip
    assert agent.run("Add 3 and 4; how warm is Rome?") == "7, and 22 degrees"
    assert called == [("add", 3, 4), ("weather", "Rome")]
    assert len(model.asked) == len(CALLS)
    assert {tool["function"]["name"] for tool in model.asked[0]["tools"]} == {
        "add", "weather", "final_answer",
    }  # fmt: skip
    told = [part["text"] for message in model.asked[-1]["messages"] for part in message["content"]]
    assert [text for text in told if text.startswith("Observation")] == [
        "Observation:\n7",
        "Observation:\n22",
    ]
