"""How a planted bug is registered: what it breaks, who must notice, which real bugs it re-creates.

`rows` are rows of the corpus of real bugs (docs/reference/corpus.md).
"""

import __future__

import inspect
import sys
import textwrap
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis.internal.conjecture import providers

import kvcore
from tests.kvcore import machines

SABOTAGES = {}


@dataclass(frozen=True)
class Sabotage:
    """One planted bug.

    Attributes:
        make: the queue, pool or manager class (or a factory) that has it.
        machine: the state machine that must notice.
        properties: the properties of which one must be seen broken.
        layouts: the layer groups on which it shows.
        rows: the rows of the corpus that it re-creates.
        patches: functions of kvcore and what takes their place.
        edits: functions and what has their code instead; without layouts the programs of steps
            must notice.
        near: the only rules that the machine runs; empty: all.
        examples: the number of examples in which the machine must notice, with all rules, on all
            layer groups and without a chosen seed; 0: it is hunted where it shows.
    """

    make: Any
    machine: type
    properties: frozenset
    layouts: tuple
    rows: tuple = ()
    patches: tuple = ()
    edits: tuple = ()
    near: tuple = ()
    examples: int = 0

    @contextmanager
    def planted(self):
        """Put the replacements in their place, wherever kvcore has imported the originals."""
        with pytest.MonkeyPatch.context() as patch:
            for original, replacement in self.edits:
                patch.setattr(original, "__code__", replacement.__code__)
            for original, replacement in self.patches:
                for name, module in list(sys.modules.items()):
                    if name.partition(".")[0] == "kvcore":
                        for attribute, value in list(vars(module).items()):
                            if value is original:
                                patch.setattr(module, attribute, replacement)
            yield


@contextmanager
def same_draws():
    """Let a derandomized search draw the same values whatever other modules are imported.

    Hypothesis draws constants from the source of every module of ours, now and then: a search for
    one bug took one second or sixty, by which tests had run before it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(providers, "_get_local_constants", providers.Constants, raising=False)
        providers.CONSTANTS_CACHE.cache.clear()
        yield
    providers.CONSTANTS_CACHE.cache.clear()


def sabotage(machine, *properties, rows=(), layouts=("full",)):
    """Register a queue, pool or manager class (or factory) as a planted bug."""

    def register(make):
        SABOTAGES[make.__name__] = Sabotage(make, machine, frozenset(properties), layouts, rows)
        return make

    return register


def in_manager(*properties, rows=(), layouts=("full",)):
    """Register a pool class as a planted bug that the manager's machine must notice."""

    def with_pool(pool_class):
        def change(manager):
            sizes = [group.block_size for group in manager.groups]
            lifetimes = manager.pool.lifetimes
            manager.pool = pool_class(manager.num_blocks, *sizes, log=manager.events)
            manager.pool.lifetimes = lifetimes
            manager.leases = kvcore.LeaseBook(manager.pool)

        return change

    def register(pool_class):
        changed(pool_class.__name__, with_pool(pool_class), *properties, rows=rows, layouts=layouts)
        return pool_class

    return register


def changed(name, change, *properties, rows=(), layouts=("full",)):
    """Register managers that `change(manager)` breaks after they were made."""

    def make(num_blocks, block_size, **options):
        manager = kvcore.KVCacheManager(num_blocks, block_size, **options)
        change(manager)
        return manager

    make.__name__ = name
    sabotage(machines.ManagerMachine, *properties, rows=rows, layouts=layouts)(make)


def patched(original, *properties, rows=(), layouts=("full",)):
    """Register what takes the place of a function of kvcore as a planted bug."""

    def register(replacement):
        SABOTAGES[replacement.__name__] = Sabotage(
            kvcore.KVCacheManager,
            machines.ManagerMachine,
            frozenset(properties),
            layouts,
            rows,
            ((original, replacement),),
        )
        return replacement

    return register


def edited(
    name, original, old, new, *properties, machine=machines.ManagerMachine, layouts=(), near=()
):
    """Register a function of kvcore, a part of whose source is replaced.

    As a bug of steps, or of another machine.
    """
    SABOTAGES[name] = Sabotage(
        kvcore.KVCacheManager,
        machine,
        frozenset(properties),
        layouts,
        edits=((original, _with_edit(name, original, old, new)),),
        near=near,
    )


def unaided(name, original, old, new, *properties, machine=machines.ManagerMachine, examples=300):
    """Register a function of kvcore, a part of whose source is replaced, to be found unaided.

    The machine runs as it does where no bug is planted: `examples`, all rules, all layer groups.
    """
    SABOTAGES[name] = Sabotage(
        kvcore.KVCacheManager,
        machine,
        frozenset(properties),
        machine.layouts,
        edits=((original, _with_edit(name, original, old, new)),),
        examples=examples,
    )


def _with_edit(name, original, old, new):
    """The function with its source replaced; the function itself where that is compiled."""
    if not inspect.isfunction(original):
        return original
    source = textwrap.dedent(inspect.getsource(original)).removeprefix("@property\n")
    assert source.count(old) == 1, f"{name}: {original.__name__} has {source.count(old)} {old!r}"
    made = {}
    flags = __future__.annotations.compiler_flag  # as in the modules of kvcore
    code = compile(source.replace(old, new), inspect.getsourcefile(original), "exec", flags)
    exec(code, vars(sys.modules[original.__module__]), made)  # noqa: S102  # with its own globals
    return made[original.__name__]
