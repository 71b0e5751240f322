"""Grammars that would do harm are refused before their request is admitted."""

import contextlib
import dataclasses
import math
import threading

import pytest

from model import EngineConfig, FinishReason, InvalidArgumentError, Submission
from model.control.grammar import Grammar
from model.engine import Engine, TwinEngine
from model.errors import GrammarError, InvalidSettingError
from model.sample import grammar_compiler, grammars
from tests.hang import HANG_S as DEADLINE_S
from tests.model.networks import ByteCodec
from tests.model.reference import ReferenceBackend
from tests.model.sample.test_engine_sampling import run
from tests.model.test_engine import PROMPT, SIZES, greedy, network

END = 256


def make(**sizes):
    model = dataclasses.replace(network(), eos_token_ids=frozenset([END]))
    return Engine(model, ReferenceBackend(), EngineConfig(**{**SIZES, **sizes}))


MANY = {f"property_{n}": {"type": "string"} for n in range(100)}
LARGE = Grammar.json_schema({"anyOf": [{"type": "object", "properties": MANY}] * 20})
NESTED = {f"d{n}": {"properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(4000)}
PATTERNS = [{"type": "string", "pattern": f".*a.{{{n}}}b.*"} for n in range(30)]
HARMFUL = {
    "a rule that is itself": (Grammar("lark", "start: start"), "no text matches it"),
    "rules that are each other": (Grammar("lark", "start: a\na: b\nb: a"), "no text matches it"),
    "a gbnf that is itself": (Grammar("gbnf", "root ::= root"), "no text matches it"),
    "a schema that is itself": (Grammar.json_schema({"$ref": "#"}), "no text matches it"),
    "a schema that is all of itself": (
        Grammar.json_schema({"allOf": [{"$ref": "#"}]}), "no text matches it"),
    "a regex of nothing": (Grammar.regex(r"a[^\s\S]"), "no text matches it"),
    "a schema of nothing": (Grammar("json_schema", "false"), "Unsatisfiable schema"),
    "lengths that exclude each other": (
        Grammar.json_schema({"type": "string", "minLength": 5, "maxLength": 2}), "Unsatisfiable"),
    "a rule that cannot go on": (
        Grammar("lark", 'start: "ab" b\nb: b'), "nothing can come after 'a"),
    "a rule without an end": (Grammar("lark", 'start: "a" start'), "Too many items"),
    "more choices than a row may have": (LARGE, "Current row has .* items"),
    "rules nested deeper than the stack": (
        Grammar("lark", "start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(20_000))
                + 'a20000: "x"'), "nested too deeply"),
    "schemas nested deeper than the stack": (
        Grammar.json_schema({"$ref": "#/$defs/d0", "$defs": {**NESTED, "d4000": {}}}),
        "nested too deeply"),
}  # fmt: skip


@pytest.fixture(scope="module")
def untouched():
    return make()


@pytest.mark.parametrize("name", HARMFUL)
def test_a_grammar_that_no_text_follows_or_that_is_too_large_is_refused(untouched, name):
    grammar, message = HARMFUL[name]
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=f"grammar: wanted a .*{message}"):
            untouched.add_request(PROMPT, greedy(2, grammar=grammar))
    assert not untouched.has_unfinished


def test_a_refusal_that_is_raised_again_and_again_does_not_grow(untouched):
    grammar, lengths = Grammar("lark", "start: start"), []
    for _ in range(4):
        with pytest.raises(InvalidArgumentError) as error:
            untouched.add_request(PROMPT, greedy(2, grammar=grammar))
        lengths.append(len(error.traceback))
    assert len(set(lengths[1:])) == 1


def test_a_grammar_that_takes_hours_and_all_memory_to_compile_is_refused(monkeypatch):
    monkeypatch.setattr(grammar_compiler, "_TRIAL_CPU_S", 1)
    grammar = Grammar.json_schema({"allOf": PATTERNS})
    with pytest.raises(InvalidArgumentError, match=r"takes more than 1 s of the processor or 1024"):
        make().check_grammar(grammar)


def test_a_grammar_stays_compiled_while_a_request_waits_whatever_others_bring(monkeypatch):
    monkeypatch.setattr(grammar_compiler, "_MOST_COMPILED", 2)
    engine = make(max_num_seqs=1)
    waiting = [engine.add_request(PROMPT, greedy(3, grammar=Grammar.choice([f"ab{n}"])))
               for n in range(5)]  # fmt: skip
    sources = []
    monkeypatch.setattr(grammar_compiler, "source_of", lambda grammar, **_: sources.append(grammar))
    run(engine, waiting)
    assert [bytes(request.output_tokens) for request in waiting] == [
        f"ab{n}".encode() for n in range(5)
    ]
    assert not sources
    assert len(engine._grammars._compiler._known) <= 2


def test_grammars_whose_masks_have_cost_much_are_forgotten_with_what_the_library_keeps(monkeypatch):
    monkeypatch.setattr(grammars, "_TRIM_EVERY_S", 0.0)
    engine = make()
    run(engine, [engine.add_request(PROMPT, greedy(3, grammar=Grammar.choice(["abc"])))])
    assert len(engine._grammars._compiler._known) == 1
    monkeypatch.setattr(grammar_compiler, "_MOST_SPENT_S", 0.0)
    run(engine, [engine.add_request(PROMPT, greedy(3, grammar=Grammar.choice(["abd"])))])
    assert not engine._grammars._compiler._known


class _Alone:
    """Ranks of which this is the only one, and what it tells the others."""

    rank, size, leads, expert_parallel = 0, 2, True, False

    def __init__(self):
        self.messages = []

    def all_reduce_min(self, number):
        return number

    def broadcast_tensor(self, tokens):
        return tokens

    def broadcast(self, message=None):
        self.messages.append(message)

    def detecting_loss(self, *, or_fail=False):
        return contextlib.nullcontext()


def test_of_several_ranks_the_first_measures_and_the_others_are_told_who_has_ended():
    ranks = _Alone()
    model = dataclasses.replace(network(), eos_token_ids=frozenset([END]), ranks=ranks)
    engine = TwinEngine(model, ReferenceBackend(), EngineConfig(**SIZES))
    guided = engine.add_request(PROMPT, greedy(9, grammar=Grammar.regex("[a-z]{20}")))
    engine._grammars._token_s = 0.0
    run(engine, [guided])
    assert (guided.finish_reason, guided.num_output_tokens) == (FinishReason.ERROR, 1)
    assert isinstance(ranks.messages[0][0], Submission)
    engine.step()
    assert [each.request_id for each in ranks.messages[-1]] == [guided.request_id]
    ranks.leads = False
    follower = Engine(model, ReferenceBackend(), EngineConfig(**SIZES))
    assert follower._grammars._token_s == follower._grammars._request_s == math.inf


def test_a_refusal_by_measured_time_is_not_remembered():
    now = iter(range(1000))
    compiler = grammar_compiler.GrammarCompiler(
        ByteCodec().describe, 257, frozenset({END}), 0.1, lambda: next(now)
    )
    grammar = Grammar.choice(["a"])
    with pytest.raises(GrammarError, match="--grammar-token-s"):
        compiler.compile(grammar).result()
    compiler._clock = lambda: 0
    assert compiler.compile(grammar).result().grammar == grammar


def compiler(**more):
    return grammar_compiler.GrammarCompiler(
        ByteCodec().describe, 257, frozenset({END}), None, **more
    )


def test_of_a_refusal_nothing_is_kept_but_its_reason():
    made, grammar = compiler(), Grammar("json_schema", "false")
    errors = [made.compile(grammar).exception() for _ in range(3)]
    assert len(set(map(id, errors))) == 3  # one error raised by many would keep all their frames
    assert {type(error) for error in errors} == {InvalidSettingError}
    assert len({str(error) for error in errors}) == 1
    [work] = made._known.values()
    assert isinstance(work.result(), str)


def test_grammars_that_cost_much_to_compile_are_forgotten_too():
    now = iter(range(0, 10_000, 3))
    made = compiler(clock=lambda: next(now))
    for n in range(5):
        assert made.compile(Grammar.choice([f"a{n}"])).result().spent_s >= 3
    assert len(made._known) <= 2


def test_a_grammar_that_somebody_has_is_not_compiled_again(monkeypatch):
    made, grammar = compiler(), Grammar.choice(["ab"])
    first = made.compile(grammar).result()
    made._known.clear()
    monkeypatch.setattr(grammar_compiler, "source_of", None)
    assert made.compile(grammar).result() is first


def test_what_the_first_grammar_would_wait_for_is_made_once_on_a_thread_that_may_compile(
    monkeypatch,
):
    engine, made, stacks, goes_on = make(), [], [], threading.Event()
    real, begun = grammar_compiler.LLTokenizer, threading.Thread.start

    def slow(*args, **more):
        made.append(threading.current_thread().name)
        assert goes_on.wait(DEADLINE_S)
        return real(*args, **more)

    def start(thread):
        stacks.append(threading.stack_size())
        begun(thread)

    monkeypatch.setattr(grammar_compiler, "LLTokenizer", slow)
    monkeypatch.setattr(threading.Thread, "start", start)
    engine.prepare_grammars()
    asked = engine.compile_grammar(Grammar.choice(["ab"]))
    assert not asked.done()
    goes_on.set()
    assert asked.result(DEADLINE_S).grammar == Grammar.choice(["ab"])
    assert [name.partition("_")[0] for name in made] == ["grammar"]
    assert set(stacks) == {grammar_compiler._STACK_BYTES}
    endless = Engine(
        dataclasses.replace(network(), eos_token_ids=frozenset()), ReferenceBackend(),
        EngineConfig(**SIZES),
    )  # fmt: skip
    endless.prepare_grammars()  # it has none, which a request with one is told


def test_a_grammar_that_nobody_waits_for_any_more_is_not_begun(monkeypatch):
    goes_on, sources, source = threading.Event(), [], grammar_compiler.source_of

    def waits(grammar, **more):
        sources.append(grammar)
        assert goes_on.wait(DEADLINE_S)
        return source(grammar, **more)

    monkeypatch.setattr(grammar_compiler, "source_of", waits)
    made = compiler()
    grammars = [Grammar.choice([f"a{n}"]) for n in range(5)]
    *begun, left, half = [made.compile(grammar) for grammar in grammars[:4]]
    other = made.compile(grammars[3])
    for each in (left, half):
        assert each.cancel()
    begun[0].cancel()
    last = made.compile(grammars[4])
    goes_on.set()
    assert [last.result(DEADLINE_S).grammar, other.result(DEADLINE_S).grammar] == [
        grammars[4], grammars[3]
    ]  # fmt: skip
    assert grammars[2] not in sources
    assert made.compile(grammars[2]).result(DEADLINE_S).grammar == grammars[2]
    made._threads.shutdown()  # the first grammar may still be compiled, for no request
    assert not made._asking
