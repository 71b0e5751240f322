"""How planted bugs are hunted, and how many in which way.

`python -m tests.kvcore.hunts` prints the figures. With names it hunts for those bugs: by
`--unaided` with all rules and no chosen seed, by `--max-examples` in at most that many examples.
"""

import argparse
import functools
import time
from dataclasses import asdict, dataclass

import hypothesis
from hypothesis import Phase, seed, settings
from hypothesis.stateful import RULE_MARKER, run_state_machine_as_test

import kvcore
from tests.kvcore import machines
from tests.kvcore.machines.programs import run_programs
from tests.kvcore.sabotage import SABOTAGES
from tests.kvcore.sabotage.registry import same_draws
from tests.kvcore.views import PropertyError

SEAMS = {
    machines.FreeQueueMachine: "make_queue",
    machines.PoolMachine: "make_pool",
    machines.ManagerMachine: "make_manager",
    machines.HybridMachine: "make_manager",
}

LIVES = ("open", "open_again", "run", "fork", "append", "truncate", "close")
LOADS = ("load_a_prefix", "begin_load", "commit_load", "fail_load", "fail_a_load_that_others_use")
KEPT = ("keep_for_later", "fork_what_is_kept", "come_back_under_pressure")
HELD = ("lease", "end_lease", "close_in_flight", "reset_in_flight", "twins")
TRANSFERS = ("lease", "fail_transfer", "fail_blocks")
UNKNOWN = ("expect", "resolve", "read_a_step", "verify_later", "run_ahead", "write_and_commit")
NEAR = {  # a planted bug, or the first word of its name: the rules that are near it
    "groups_hit_what_one_of_them_lacks": ("open", "run", "come_back_under_pressure", "close"),
    "groups_keep_in_part_what_another_reads": (*LIVES, *LOADS, *TRANSFERS),
    "items": (*LIVES, "meet_the_neighbours"),
    "leases": (*LIVES, *HELD, "reserve", "tick"),
    "leases_count_what_a_look_up_found": ("open", "run", "close_in_flight", "close"),
    "loads": (*LIVES, *LOADS, "reserve", "tick"),
    "loads_fail_without_the_copies_of_forks": ("open", "run", "fork", "fail_load", "close"),
    "loads_join_after_a_gap": ("load_a_prefix", "close"),
    "loads_join_whatever_the_tokens_are_now": ("load_a_prefix", "close"),
    "loads_keep_what_is_out_of_sight": ("load_a_prefix", "close"),
    "loads_leak_what_comes_too_late": ("load_a_prefix", "close"),
    "look": (*LIVES, "keep_for_later", "come_back_under_pressure"),
    "look_ups_forget_what_they_were_asked_to_keep": (
        "open",
        "run",
        "keep_for_later",
        "close",
        "tick",
    ),
    "manager_accepts_a_stale_handle": ("open", "run", "close", "use_a_closed_one"),
    "manager_counts_one_token_of_whoever_decodes": (*LIVES, "decode_at_once"),
    "manager_keeps_a_scrambled_order_at_a_reset": ("open", "run", "close", "reset", "churn"),
    "manager_keeps_from_others_what_was_not_looked_up": ("open_again", "open", "run", "close"),
    "manager_overwrites_what_a_fork_shares": (*LIVES, "diverge", "edit"),
    "manager_publishes_a_half_full_block": (*LIVES, "reserve", "write_and_commit"),
    "manager_publishes_what_a_step_only_schedules": (*LIVES, "serve"),
    "retention": (*LIVES, *KEPT, "tick"),
    "transfers_fail_in_their_own_blocks_alone": (
        "open",
        "run",
        "diverge",
        "lease",
        "fail_transfer",
        "close",
    ),
    "unknown": (*LIVES, *UNKNOWN, "reserve"),
}
"""The machine has fifty rules: where all may run, those that meet seldom do so one after another.

All of them run where no bug is planted (`test_machines`), and on every bug that is not named here.
"""


ALL_RULES = (  # found soon with all of them, though others whose names begin alike are not
    "items_are_bytes_without_a_shape",
    "items_are_known_by_16_bits",
    "items_are_left_to_their_token_ids",
    "items_with_a_mask_are_cached_without_a_key",
    "leases_are_a_flag",
    "leases_count_what_an_ended_one_held",
    "leases_end_and_keep_what_they_held",
    "leases_end_twice",
    "leases_end_with_a_reset",
    "leases_end_with_their_sequence",
    "leases_hide_what_will_be_free",
    "leases_hold_nothing",
    "leases_miss_what_a_close_leaves_to_them",
    "leases_never_expire",
    "loads_are_found_before_they_arrive",
    "loads_keep_too_few_blocks_of_a_window",
)


def near(name):
    """The only rules that the machine runs where a bug is planted; none: all of them."""
    if name in ALL_RULES:
        return ()
    return SABOTAGES[name].near or NEAR.get(name, NEAR.get(name.partition("_")[0], ()))


def without_others(machine, kept):
    """What a subclass of the machine has in order to run no rules but some."""
    rules = {rule: getattr(machine, rule) for rule in dir(machine)}
    return {
        rule: functools.partialmethod(method)  # callable as before, and no rule
        for rule, method in rules.items()
        if hasattr(method, RULE_MARKER) and rule not in kept
    }


SEEDS = {
    "groups_hit_what_one_of_them_lacks": 0,
    "leases_hold_the_block_that_a_look_up_finds": 0,
    "loads_are_never_found": 0,
    "look_ups_make_what_they_find_young": 0,
    "look_ups_make_what_was_used_old": 0,
    "manager_cuts_tokens_and_keeps_their_identity": 0,
    "manager_grows_half_a_step_before_it_refuses": 2,
    "manager_keeps_a_scrambled_order_at_a_reset": 1,
    "manager_makes_room_past_the_longest_sequence": 0,
    "manager_names_blocks_by_tokens_long_gone": 0,
    "plan_in_chunks_takes_again_what_others_hold": 0,
    "states_are_dropped_while_a_step_reads_them": 0,
    "states_are_forgotten_until_their_tokens_are_known": 1,
    "states_are_freed_while_they_are_written": 0,
    "states_are_retained_by_the_first_request_alone": 1,
    "states_are_said_to_have_room": 0,
    "states_are_written_where_they_are_just_published": 0,
    "states_hit_what_a_draft_model_computes_again": 1,
    "states_of_another_position_are_read": 2,
    "states_of_unknown_tokens_are_published_at_the_end": 0,
    "states_resume_behind_a_cut": 2,
    "states_resume_where_a_window_is_gone": 6,
    "states_that_are_kept_are_written_when_shared": 0,
    "step_gives_a_decoder_its_neighbours_token": 7,
    "transfers_fail_after_the_block_that_was_bad": 3,
}
"""Where the search that begins as all do takes seconds, one that begins elsewhere and does not.

Any finds the bug. A number is that of the programs, or of Hypothesis' draws.
"""

# Reproducible, and without the search for a smaller example: here only the verdict counts.
HUNT = settings(
    max_examples=3000,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    print_blob=False,
    deadline=None,
)


def machine_of(name, *, is_aided):
    """The machine that hunts for a planted bug: aided by fewer rules or a chosen seed, or not."""
    planted = SABOTAGES[name]
    own = {SEAMS[planted.machine]: staticmethod(planted.make)}
    if hasattr(planted.machine, "layouts"):
        own["layouts"] = planted.layouts or planted.machine.layouts
    if not planted.examples:
        own["with_events"] = "always" if "P21" in planted.properties else "never"
    if is_aided and near(name):
        own |= without_others(planted.machine, near(name))
    broken = type(name, (planted.machine,), own)
    return seed(SEEDS[name])(broken) if is_aided and name in SEEDS else broken


def hunt(name, *, settings=HUNT, is_aided=True):
    """Run the machine on a planted bug; return the property that it says is broken, or None.

    Where it is not aided it has all rules and no chosen seed. An error of misuse that a rule did
    not expect is P3: the allocator's own guard has seen that its caller, here the broken part,
    broke a rule. So is a strict `zip` of lists that differ in length.
    """
    planted = SABOTAGES[name]
    is_aided = is_aided and not planted.examples
    if planted.examples:
        settings = hypothesis.settings(settings, max_examples=planted.examples)
    broken = machine_of(name, is_aided=is_aided)
    try:
        with planted.planted(), same_draws():
            if is_aided and is_program(planted):
                run_programs(SEEDS.get(name, 0), 1000)
            else:
                run_state_machine_as_test(broken, settings=settings)
    except (PropertyError, kvcore.InvariantError) as error:
        return error.prop
    except kvcore.MisuseError:
        return "P3"
    except ValueError as error:
        if "zip()" not in str(error):
            raise
        return "P3"
    except kvcore.OutOfBlocksError:
        return "P13"
    return None


def is_program(planted):
    """Whether the short programs of steps hunt for it."""
    return bool(planted.edits) and not planted.layouts


@dataclass(frozen=True)
class Figures:
    """How many planted bugs there are, and how many are hunted in which way.

    Attributes:
        planted: all of them; every one is in one of the three groups at the end.
        re_created: those that re-create rows of the corpus of bugs that engines have shipped.
        within: those that the machine finds in a stated number of examples, on all layer groups.
        near: those for which it runs only the rules near them.
        seeded: those for which a seed was chosen.
        unaided: those that a machine finds with all rules and without a chosen seed.
        aided: those that it finds with fewer rules, or with a chosen seed, or with both.
        programs: those that short programs of steps find.
    """

    planted: int
    re_created: int
    within: int
    near: int
    seeded: int
    unaided: int
    aided: int
    programs: int

    def sentence(self):
        """The claim of the README and of the page on tests."""
        return (
            f"{self.planted} planted bugs ({self.re_created} re-create bugs that engines have "
            f"shipped) are all caught by a property that they break: {self.unaided} by a machine "
            f"with all rules and no chosen seed, {self.aided} with fewer rules or a chosen seed, "
            f"{self.programs} by fixed programs"
        )


def figures():
    """Count the planted bugs of `SABOTAGES` from the tables by which they are hunted."""
    programs = {name for name, planted in SABOTAGES.items() if is_program(planted)}
    narrowed = {name for name in SABOTAGES if near(name)} - programs
    aided = (narrowed | {*SEEDS}) - programs
    return Figures(
        planted=len(SABOTAGES),
        re_created=sum(bool(planted.rows) for planted in SABOTAGES.values()),
        within=sum(planted.examples > 0 for planted in SABOTAGES.values()),
        near=len(narrowed),
        seeded=len(SEEDS),
        unaided=len(SABOTAGES) - len(aided) - len(programs),
        aided=len(aided),
        programs=len(programs),
    )


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.kvcore.hunts", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="planted bugs to hunt for")
    parser.add_argument("--unaided", action="store_true", help="all rules, no chosen seed")
    parser.add_argument("--max-examples", type=int, default=HUNT.max_examples, metavar="N")
    args = parser.parse_args()
    if not args.names:
        for name, number in asdict(figures()).items():
            print(f"{name:12} {number:4}")
        print(figures().sentence() + ".")
    most = settings(HUNT, max_examples=args.max_examples)
    for name in args.names:
        began = time.process_time()
        found = hunt(name, settings=most, is_aided=not args.unaided) or "not found"
        print(f"{name}: {found} in {time.process_time() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
