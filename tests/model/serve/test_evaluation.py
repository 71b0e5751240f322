"""lm-evaluation-harness scores the server as it scores the same network in its own `hf` model.

Two small tasks, written here so that nothing is downloaded: one by log-likelihood (which of four
words comes next), one by generation; both over `local-completions`, the second over
`local-chat-completions` too.
"""

import importlib
import json
import random
import shutil

import pytest

import backends
from model.async_engine import AsyncEngine
from model.control.config import EngineConfig
from model.engine import Engine
from model.load.loader import load_model
from model.serve.config import ServeConfig
from model.tiny import CHECKPOINT_DIR
from tests.model.serve.conftest import Served

lm_eval = pytest.importorskip(
    "lm_eval", reason='lm-eval is not installed: pip install "lm-eval[api]"'
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of lm-eval and what it imports
]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} said: {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}Then{% endif %}"
)
WORDS = ("little", "house", "forest", "friends", "river", "garden", "morning", "happy")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with two tasks of 8 documents each."""
    folder = tmp_path_factory.mktemp("tasks")
    dice = random.Random(7)
    documents = folder / "documents.jsonl"
    with documents.open("w") as file:
        for _ in range(8):
            choices = dice.sample(WORDS, 4)
            text = f"Once upon a time there was a {dice.choice(WORDS)} in the {dice.choice(WORDS)}."
            line = {"text": f"{text} It was a", "choices": choices, "gold": dice.randrange(4)}
            file.write(json.dumps(line | {"target": choices[0]}) + "\n")
    for name, kind in (("words", MULTIPLE_CHOICE), ("goes_on", GENERATION)):
        text = kind.format(name=name, documents=documents)
        (folder / f"{name}.yaml").write_text(text)
    return importlib.import_module("lm_eval.tasks").TaskManager(
        include_path=str(folder), include_defaults=False
    )


MULTIPLE_CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {documents}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{text}}}}"
doc_to_target: gold
doc_to_choice: choices
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
GENERATION = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {documents}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{target}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 12, do_sample: false, temperature: 0.0}}
metric_list: [{{metric: exact_match}}]
"""


def evaluate(tasks, kind, name, arguments, **options):
    """The scores of a task, and what was answered to each document."""
    found = lm_eval.simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=[name],
        task_manager=tasks,
        log_samples=True,
        bootstrap_iters=0,
        **options,
    )
    scores = {key: one for key, one in found["results"][name].items() if "stderr" not in key}
    return scores, [sample["resps"] for sample in found["samples"][name]]


@pytest.fixture
def by_hf(tasks):
    def run(name, folder=CHECKPOINT_DIR, **options):
        arguments = {"pretrained": str(folder), "device": "cpu", "dtype": "float32"}
        return evaluate(tasks, "hf", name, arguments, **options)

    return run


def over_http(tasks, served, name, kind, path, **options):
    arguments = {
        "model": "tiny",
        "base_url": served.url + path,
        "tokenizer": str(CHECKPOINT_DIR),
        "tokenizer_backend": "huggingface",
        "max_retries": 1,
    }
    return evaluate(tasks, kind, name, arguments, **options)


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    """A server of the tiny model with a chat template, which `hf` needs; and its folder."""
    folder = tmp_path_factory.mktemp("chatting") / "tiny"
    shutil.copytree(CHECKPOINT_DIR, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    backend = backends.get_backend("numba")
    model = load_model(str(folder), backend.device)
    config = ServeConfig(port=0, served_model_name="tiny")

    def make():
        return Engine(model, backend, EngineConfig(num_blocks=400))

    with Served(AsyncEngine(make), config) as running:
        yield folder, running


def test_log_likelihoods_are_those_of_the_network(tasks, served, by_hf):
    scores, answers = by_hf("words")
    ours, mine = over_http(tasks, served, "words", "local-completions", "/v1/completions")
    assert ours == scores
    for one, other in zip(mine, answers, strict=True):
        for (ours_log, ours_greedy), (log, greedy) in zip(
            [each[0] for each in one], [each[0] for each in other], strict=True
        ):
            assert float(ours_log) == pytest.approx(float(log), abs=1e-3)
            assert ours_greedy == greedy


def test_texts_are_those_of_the_network(tasks, served, by_hf):
    scores, answers = by_hf("goes_on")
    ours, mine = over_http(tasks, served, "goes_on", "local-completions", "/v1/completions")
    assert (ours, mine) == (scores, answers)


def test_chats_are_those_of_the_network(tasks, chatting, by_hf):
    folder, served = chatting
    scores, answers = by_hf("goes_on", folder, apply_chat_template=True)
    ours, mine = over_http(
        tasks,
        served,
        "goes_on",
        "local-chat-completions",
        "/v1/chat/completions",
        apply_chat_template=True,
    )
    assert (ours, mine) == (scores, answers)
