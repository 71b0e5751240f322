"""`kvcore.testing` finds what is wrong, and finds nothing wrong in what is right."""

import dataclasses
import re
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import hypothesis
import pytest
from hypothesis import Phase
from hypothesis.stateful import RULE_MARKER

from kvcore import testing
from kvcore.testing import EVERYTHING, Promise
from kvcore.testing.shorten import replay, shorten
from tests.kvcore.engines import (
    BROKEN,
    DictionaryAllocator,
    OurAllocator,
    OurStates,
    OurWindows,
)
from tests.kvcore.engines.broken import LooksUpOnly
from tests.kvcore.sabotage.registry import same_draws
from tests.kvcore.testing.test_tiering import BROKEN_TIERS

TestOurs = pytest.mark.hypothesis(testing.allocator_tests(OurAllocator))
TestOurWindows = pytest.mark.hypothesis(testing.allocator_tests(OurWindows))
TestOurStates = pytest.mark.hypothesis(testing.allocator_tests(OurStates))

ROOT = Path(__file__).parents[3]
VERBS = [name for name in vars(testing.Allocator) if name[0] != "_" and name != "promises"]
OPTIONAL_VERBS = [verb for verbs in testing.protocol.OPTIONAL_VERBS.values() for verb in verbs]


def quick(**changes):
    """The same examples every time, and none stored; as many as the profile has, or fewer."""
    return hypothesis.settings(derandomize=True, database=None, print_blob=False, **changes)


def verdict(make, machines=None, **changes):
    """What the machines find: a property's number, a crash, or nothing."""
    settings = quick(phases=[Phase.generate], **changes)
    try:
        with getattr(make, "planted", nullcontext)(), same_draws():
            testing.check_allocator(make, machines=machines, settings=settings)
    except testing.PropertyError as error:
        return error.prop
    except testing.CrashError:
        return "crash"
    return None


class TakesAllAtOnce(DictionaryAllocator):
    """Room for all that is left, and commits in parts."""

    promises = EVERYTHING - {Promise.CHUNK}


@pytest.mark.parametrize("make", [LooksUpOnly, TakesAllAtOnce])
def test_nothing_is_wrong_with_plain_lists(make):
    """Nor with those that promise all: see `test_every_rule_of_a_machine_runs`."""
    assert verdict(make, max_examples=20) is None


def marked(name):
    is_planted = hasattr(BROKEN[name][0], "planted")
    return pytest.param(name, marks=pytest.mark.source_build) if is_planted else name


@pytest.mark.parametrize("name", [*map(marked, BROKEN)])
def test_a_broken_allocator_is_caught(name):
    cls, properties, machines = BROKEN[name]
    assert verdict(cls, machines, max_examples=1000) in properties  # nearly all within 100


def test_the_machines_see_every_kind_of_event_with_our_own_allocator():
    seen = testing.check_allocator(OurAllocator, settings=quick(max_examples=40))
    wanted = {
        "aborted", "cut", "evictions", "forks", "full hits", "hits", "kept apart", "misuse",
        "no space", "resets", "shared blocks", "expected", "resolved", "leases", "swapped out",
        "swapped in", "events", "examples",
    }  # fmt: skip
    assert {what for what, count in seen.items() if count} == wanted
    assert seen["hits"] > 30
    assert seen["evictions"] > 30


def counting(machine, ran):
    """The machine, each of whose rules counts its runs."""

    def counted(name, rule):
        def run(self, **drawn):
            ran[name] += 1
            return rule.function(self, **drawn)

        run.__name__ = name
        setattr(run, RULE_MARKER, dataclasses.replace(rule, function=run))
        return run

    rules = {name: getattr(getattr(machine, name), RULE_MARKER, None) for name in dir(machine)}
    rules = {name: counted(name, rule) for name, rule in rules.items() if rule}
    return type(machine.__name__, (machine,), rules), set(rules)


@pytest.mark.parametrize("machine", [*testing.MACHINES, testing.GroupMachine])
def test_every_rule_of_a_machine_runs(machine):
    ran = Counter()
    counted, rules = counting(machine, ran)
    make = OurWindows if machine is testing.GroupMachine else DictionaryAllocator
    for max_examples in (20, 200):  # what is drawn differs with the version of Python
        settings = quick(max_examples=max_examples)
        testing.check_allocator(make, machines=[counted], settings=settings)
        if rules <= set(ran):
            break
    assert len(rules) > 5
    assert rules <= set(ran), rules - set(ran)


class NoFrills:
    """The eight verbs and no promise at all."""

    promises = frozenset()

    def __init__(self):
        inner = LooksUpOnly()
        for verb in VERBS:
            setattr(self, verb, getattr(inner, verb))


def test_what_is_not_promised_is_not_asked_for():
    seen = testing.check_allocator(NoFrills, settings=quick(max_examples=10))
    assert not {"cut", "forks", "resets"} & set(seen)
    assert seen["hits"]


def test_without_strict_the_only_misuse_is_a_second_finish_and_it_must_change_nothing():
    called = set()

    class Notes(NoFrills):
        def __init__(self):
            super().__init__()
            ended = []

            def note(verb, call):
                def noted(request, *arguments):
                    if any(request is one for one in ended):
                        called.add(verb)
                    return call(request, *arguments)

                return noted

            for verb in ("reserve", "commit", "append", "finish", "block_table"):
                setattr(self, verb, note(verb, getattr(self, verb)))
            finish = self.finish
            self.finish = lambda request: (finish(request), ended.append(request))

    class ReleasesAgain(NoFrills):
        def __init__(self):
            super().__init__()
            self.surplus, finish, count = [], self.finish, self.num_free_blocks

            def accept(request):
                try:
                    finish(request)
                except KeyError:  # it has ended: accepted all the same
                    self.surplus.append(request)

            self.finish = accept
            self.num_free_blocks = lambda: count() + len(self.surplus)

    requests = [testing.RequestMachine]
    seen = testing.check_allocator(Notes, machines=requests, settings=quick(max_examples=10))
    assert seen["misuse"]
    assert called == {"finish"}
    assert verdict(ReleasesAgain, requests, max_examples=10) == "P4"


@pytest.mark.source_build
@pytest.mark.parametrize(
    ("promise", "name"),
    [
        (Promise.KEEP, "forgets_all_copies_with_the_first"),
        (Promise.LRU, "reuses_the_newest"),
        (Promise.STRICT, "guards_with_an_assert"),
        (Promise.TENANTS, "ignores_the_tenant"),
        (Promise.RESET, "manager_says_reset_and_does_nothing"),
        (Promise.FORK, "manager_forks_a_half_full_block_without_a_copy"),
        (Promise.COMMIT, "manager_publishes_what_is_only_reserved"),
        (Promise.RESOLVE, "unknown_tokens_are_never_found_once_told"),
        (Promise.ITEMS, "items_are_left_to_their_token_ids"),
        (Promise.LEASE, "leases_end_with_their_sequence"),
        (Promise.EVENTS, "events_forget_removals"),
        (Promise.SWAP, "copies_back_in_the_wrong_order"),
    ],
)
def test_a_promise_that_is_withdrawn_is_not_held_against_an_allocator(promise, name):
    cls = BROKEN[name][0]  # which is caught: see above
    allocator = type(name, (cls,), {"promises": cls.promises - {promise}})
    assert verdict(allocator, max_examples=10) is None


def failure(make, machine):
    with pytest.raises(testing.PropertyError) as caught:
        testing.check_allocator(make, machines=[machine], settings=quick())
    return caught.value


def test_a_failure_reads_as_a_program_and_runs_as_one():
    error = failure(BROKEN["ignores_the_tenant"][0], testing.TenantMachine)
    lines = [line.strip() for line in error.program.splitlines()]
    assert len(lines) < 12
    assert lines[0].startswith("allocator.start(")
    found = re.fullmatch(r"(\w+), cached = allocator\.begin\(.*\)  # ([1-9])", lines[-1])
    assert found, lines[-1]
    names = {"allocator": BROKEN["ignores_the_tenant"][0]()}
    for line in lines:
        exec(line, names)  # noqa: S102  # the program that the error shows
    assert names["cached"] == int(found[2])
    assert error.message in str(error)
    assert error.message.startswith(f"P7: {found[1]} hits block ")


def test_a_failure_is_shortened_to_the_steps_that_matter():
    driver = testing.Driver(BROKEN["ignores_the_tenant"][0]())
    driver.start(9, 2)
    for prompt in ([5], [6, 6, 6], [7, 7]):
        driver.finish(driver.begin(prompt))
    first = driver.begin([0, 0, 0, 0, 0], "red")
    driver.reserve(first, 5)
    driver.commit(first, 5)
    with pytest.raises(testing.PropertyError) as caught:
        driver.begin([0, 0, 0, 0, 0, 0, 0], "blue")
    shorten(BROKEN["ignores_the_tenant"][0], caught.value)
    assert caught.value.program.replace("    ", "").splitlines() == [
        "allocator.start(2, 2)  # [1]",
        "a, cached = allocator.begin([0, 0], 'red')  # 0",
        "allocator.reserve(a, 2)  # [1]",
        "allocator.commit(a, 2)",
        "b, cached = allocator.begin([0, 0, 0], 'blue')  # 2",
    ]
    assert caught.value.message.startswith("P7: b hits block 1")


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("red", "blue", "wanted [0] of tenant 'blue', got [0] of tenant 'red'"),
        ("", "blue", "wanted [0] of tenant 'blue', got [0] of the tenant without a name"),
        ("red", "", "wanted [0] of the tenant without a name, got [0] of tenant 'red'"),
    ],
)
def test_a_hit_of_another_tenant_names_both(first, second, message):
    driver = testing.Driver(BROKEN["ignores_the_tenant"][0]())
    driver.start(4, 2)
    one = driver.begin([0, 0], first)
    driver.reserve(one, 2)
    driver.commit(one, 2)
    with pytest.raises(testing.PropertyError) as caught:
        driver.begin([0, 0, 0], second)
    assert caught.value.message == f"P7: b hits block 1: at position 0 it {message}"


@pytest.mark.parametrize(
    "name", ["refuses_the_last_block", "counts_hits_as_free", "reuses_the_newest"]
)
def test_a_shortened_failure_is_the_same_failure(name):
    cls, properties, _ = BROKEN[name]
    error = failure(cls, testing.RequestMachine)
    again = replay(cls, error.steps)
    assert isinstance(again, testing.PropertyError)
    assert (again.prop, str(again)) == (error.prop, str(error))
    assert error.prop in properties
    assert len(error.steps) < 16


def test_what_is_found_again_after_a_swap_is_not_reused_too_late():
    driver = testing.Driver(DictionaryAllocator())
    driver.start(3, 1)
    swapped = driver.begin([0, 0])
    driver.reserve(swapped, 2)
    driver.commit(swapped, 2)
    driver.swap_out(swapped)
    other = driver.begin([0])
    driver.reserve(other, 1)
    driver.commit(other, 1)
    driver.finish(other)
    assert driver.swap_in(swapped)


@pytest.mark.parametrize("drop", range(1, 5))
def test_steps_out_of_order_are_no_failure(drop):
    driver = testing.Driver(LooksUpOnly())
    driver.start(5, 2)
    request = driver.begin([1, 2, 3])
    driver.reserve(request, 3)
    driver.commit(request, 3)
    driver.truncate(request, 2)
    steps = tuple(driver.program.steps)
    assert replay(LooksUpOnly, steps[:drop] + steps[drop + 1 :]) is None


def test_a_crash_is_told_apart_and_keeps_its_cause():
    with pytest.raises(testing.CrashError, match="though the call was in order") as caught:
        testing.check_allocator(
            BROKEN["raises_where_there_is_no_space"][0],
            machines=[testing.RequestMachine],
            settings=quick(),
        )
    assert isinstance(caught.value.__cause__, IndexError)
    assert caught.value.program.endswith("# IndexError")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"promises": None}, "promises: wanted a collection of Promise, got None"),
        ({"promises": {"hold"}}, "promises: wanted a collection of Promise"),
        ({"commit": None}, "has no commit"),
        ({"fork": None, "reset": None}, "has no fork, reset"),
        ({"begin": lambda self, tokens, tenant: 0}, "begin: wanted a pair, got 0"),
        ({"begin": lambda self, tokens, tenant: (0, None)}, "begin: wanted a number, got None"),
        ({"reserve": lambda self, request, count: 3}, "reserve: wanted block ids, got 3"),
        ({"block_table": lambda self, request: "12"}, "block_table: wanted block ids, got '12'"),
        ({"num_free_blocks": lambda self: True}, "num_free_blocks: wanted a number, got True"),
        ({"fork": lambda self, request: (request, "ab")}, "fork: wanted pairs of block ids"),
        ({"truncate": lambda self, request, count: None}, "truncate: wanted a number, got None"),
    ],
)
def test_what_is_no_adapter_is_told_what_is_missing(changes, message):
    adapter = type("NoAdapter", (DictionaryAllocator,), changes)
    with pytest.raises(testing.AdapterError, match=re.escape(message)):
        testing.check_allocator(adapter, settings=quick(phases=[Phase.generate]))


def test_a_null_block_that_is_none_of_its_ids_is_a_broken_start():
    def start(self, num_blocks, block_size):
        super(DictionaryAllocator, self).__init__()
        return range(1, num_blocks + 1)

    adapter = type("OneTooMany", (DictionaryAllocator,), {"start": start})
    assert verdict(adapter) == "P1"


def test_the_page_names_every_verb_promise_machine_and_property():
    page = (ROOT / "docs" / "reference" / "testing-api.md").read_text(encoding="utf-8")
    for promise in Promise:
        assert promise.name in page
    for verb in [*VERBS, *OPTIONAL_VERBS]:
        assert f"| `{verb}(" in page
    for machine in [*testing.MACHINES, testing.GroupMachine]:
        assert f"| `{machine.__name__}` |" in page
    package = Path(testing.__file__).parent
    sources = [path.read_text(encoding="utf-8") for path in package.glob("*.py")]
    raised = set(re.findall(r'"(P\d+)"', "".join(sources)))
    rows = re.findall(r"^\| (P\d+(?:, P\d+)*) \|", page, re.MULTILINE)
    listed = {prop for props in rows for prop in props.split(", ")}
    assert raised == listed
    caught = {prop for _, properties, _ in BROKEN.values() for prop in properties}
    assert listed <= caught.union(*[props.split() for _, props in BROKEN_TIERS])


def test_a_test_case_has_a_test_for_each_machine():
    names = [name for name in dir(TestOurs) if name.startswith("test_")]
    assert sorted(names) == sorted(f"test_{machine.__name__}" for machine in testing.MACHINES)


def test_a_driver_can_be_driven_by_hand():
    driver = testing.Driver(OurAllocator())
    driver.start(6, 2)
    first = driver.begin([1, 2, 3])
    assert driver.reserve(first, 3)
    driver.commit(first, 3)
    second = driver.begin([1, 2, 4])
    assert (first.block_table, second.cached, second.block_table) == ([1, 2], 2, [1])
    driver.finish(first)
    driver.finish(second)
    assert driver.seen["hits"] == 1


def fork_and_finish_both(driver, request):
    child = driver.fork(request)
    driver.finish(request)
    driver.finish(child)


@pytest.mark.parametrize(
    "leave",
    [
        testing.Driver.finish,
        testing.Driver.swap_out,
        lambda driver, request: driver.truncate(request, 0),
        fork_and_finish_both,
    ],
    ids=["finish", "swap out", "truncate", "fork"],
)
def test_a_look_up_that_came_to_nothing_may_leave_the_order_of_reuse_as_it_was(leave):
    driver = testing.Driver(OurAllocator())
    driver.start(4, 2)
    for prompt in ([0, 0, 2], [0, 1, 1, 1, 2]):
        request = driver.begin(prompt)
        assert driver.reserve(request, len(prompt) // 2 * 2)
        driver.commit(request, len(prompt) // 2 * 2)
        driver.finish(request)
    looked_up = driver.begin([0, 0, 0])
    assert looked_up.cached == 2
    leave(driver, looked_up)
    next_one = driver.begin([3])
    assert driver.reserve(next_one, 1)
    assert next_one.block_table == [1]  # though a look-up has found it last


def test_without_hypothesis_the_import_says_what_to_install():
    script = "import sys; sys.modules['hypothesis'] = None; import kvcore; import kvcore.testing"
    result = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {script}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "ImportError: kvcore.testing needs Hypothesis: pip install 'kvcore[testing]'"
    )
