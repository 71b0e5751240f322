"""A client with many requests does not delay the first token of another."""

import httpx
import pytest

from model import SamplingParams, Submission
from model.async_engine import AsyncEngine
from model.serve.config import ServeConfig
from tests.model.serve.conftest import DEADLINE_S, Served

MANY = 500


def steps_to_first_token(engine, client, most=MANY):
    """How many steps a request waits for its first token; one more than `most`: even longer."""
    asked = Submission("The open() function", SamplingParams(max_tokens=4), client=client)
    [request] = engine.submit(asked)
    steps = 0
    while not request.output_tokens and steps <= most:
        engine.step()
        steps += 1
    return steps


@pytest.mark.parametrize("client", ["new", "many"])
def test_a_second_client_waits_at_most_three_times_as_long_as_alone(make_engine, client):
    engine = make_engine(num_blocks=2000, max_num_seqs=8)
    alone = steps_to_first_token(engine, client)
    for number in range(MANY):
        prompt = [number % 100 + 1] * 20
        engine.submit(Submission(prompt, SamplingParams(max_tokens=100), client="many"))
    for _ in range(5):
        engine.step()
    # The same request of the client that has sent them all waits for most of them.
    most = 3 * alone
    assert (steps_to_first_token(engine, client, most) <= most) is (client == "new")


def clients_of(served, bodies, keys=(None,)):
    """The clients of the requests that these bodies make, sent with these keys in turn."""
    seen = []

    def spy(engine):
        submit = engine.submit
        engine.submit = lambda asked: seen.append(asked.client) or submit(asked)

    served.call(spy)
    with httpx.Client(base_url=served.url, timeout=DEADLINE_S) as http:
        for body, key in zip(bodies, keys, strict=True):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            asked = {"prompt": "x", "max_tokens": 1} | body
            assert http.post("/v1/completions", json=asked, headers=headers).status_code == 200
    return seen


def test_the_field_user_says_whose_a_request_is(make_engine):
    with Served(AsyncEngine(make_engine), ServeConfig(port=0)) as served:
        assert clients_of(served, [{}, {"user": "red"}], [None, None]) == [None, "red"]


def test_where_clients_have_keys_the_key_says_it(make_engine):
    config = ServeConfig(port=0, api_keys=("one", "two"))
    with Served(AsyncEngine(make_engine), config) as served:
        bodies = [{"user": "red"}, {"user": "blue"}, {}]
        first, same, other = clients_of(served, bodies, ["one", "one", "two"])
    assert first == same != other
    assert not {first, other} & {None, "red", "blue"}
    assert "one" not in first
