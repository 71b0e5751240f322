"""Short programs for the machines: what they found once, or would find too seldom."""

from tests.kvcore.wire.machine import SPACES


class Life:
    """What a publisher's life is like, for the machine to draw."""

    def __init__(self, *, plain=False, layout="full", kept=1):
        self.drawn = {
            "plain": plain, "idle": False, "salted": False, "layout": layout, "blocks": 8,
            "patience": 100, "form": "map", "names": "u64", "kept bytes": kept,
        }  # fmt: skip

    def draw(self, strategy, label):
        return self.drawn[label]


PLAIN = Life(plain=True, kept=10**6)


def serve(machine, tokens, fate="arrives"):
    machine.serve("a", tokens, SPACES[0], close=False, fate=fate)


def a_group_of_a_life_before_is_not_waited_for(machine):
    machine.start(Life(layout="two full"))
    machine.settle()
    serve(machine, [0, 1, 1, 1])
    machine.restart("a", Life())
    serve(machine, [0, 1])


def what_comes_late_from_a_life_before_is_asked_for_once(machine, first=PLAIN):
    machine.start(first)
    machine.settle()
    serve(machine, [0, 1])
    machine.ask("a")
    serve(machine, [0, 1, 1, 1])
    machine.restart("a", PLAIN)
    serve(machine, [0, 0])


def a_number_from_the_time_is_no_newer_for_being_higher(machine):
    what_comes_late_from_a_life_before_is_asked_for_once(machine, Life())


def a_life_that_has_said_nothing_is_not_taken_for_the_one_before(machine):
    machine.start(Life())
    serve(machine, [0, 1])
    machine.restart("a", PLAIN)


def an_answer_of_a_life_before_is_followed_by_the_new_life(machine):
    machine.start(Life())
    serve(machine, [0, 1])
    machine.compose("a")
    machine.restart("a", Life())
    serve(machine, [0, 0])


def a_batch_lost_while_an_answer_is_under_way_is_asked_for(machine):
    machine.start(Life(kept=10**6))
    serve(machine, [1, 1])
    machine.settle()
    machine.ask("a")
    machine.compose("a")
    serve(machine, [0, 1], "lost")
    serve(machine, [0, 0])
    machine.answer("a", 0)


def a_new_life_with_the_next_number_is_not_taken_for_the_old(machine):
    machine.start(PLAIN)
    serve(machine, [0, 1])
    machine.restart("a", PLAIN)
    serve(machine, [0, 0], "lost")
    serve(machine, [1, 1], "lost")


def a_repeat_is_no_new_life(machine):
    machine.start(PLAIN)
    serve(machine, [0, 1])
    serve(machine, [1, 1])
    machine.repeat("a", 0)
    machine.restart("a", PLAIN)
    serve(machine, [0, 0], "lost")
    serve(machine, [1, 0])


def what_may_have_gone_since_is_forgotten(machine):
    machine.start(Life(plain=True))
    serve(machine, [0, 1])
    machine.finish("a")
    machine.reset("a")
    machine.publish("a")
    machine.lose("a", 0)
    serve(machine, [0, 0], "lost")


def a_window_looks_past_what_is_gone(machine, layout="window"):
    machine.start(Life(layout=layout, kept=10**6))
    serve(machine, [0] * 8)
    machine.finish("a")
    for tokens in ([1, 1, 1, 1], [1, 0], [0, 0, 0, 0, 1, 1]):
        serve(machine, tokens)
        machine.finish("a")


def a_window_that_is_alone_is_known_too(machine):
    a_window_looks_past_what_is_gone(machine, "window alone")


def a_window_sees_all_that_it_says(machine):
    machine.start(Life(layout="window alone", kept=10**6))
    serve(machine, [1] * 6)
    machine.finish("a")
    serve(machine, [0] * 8 + [1] * 4)
    machine.finish("a")


def a_snapshot_may_tell_of_windows_first(machine):
    machine.start(Life(layout="windows first"))
    serve(machine, [0] * 4, "lost")
    serve(machine, [0] * 4 + [1] * 2, "lost")


def a_batch_that_clears_twice_is_no_snapshot(machine):
    machine.start(Life(layout="window"))
    machine.reset("a")
    serve(machine, [0] * 4, "not sent")
    machine.reset("a")


def what_is_lost_while_an_answer_is_made_is_in_neither(machine):
    machine.start(Life())
    serve(machine, [0] * 4)
    serve(machine, [0, 0, 1, 1], "waits")
    machine.compose("a")
    serve(machine, [1, 1], "lost")


def a_snapshot_after_a_clearing_that_was_lost_clears(machine):
    machine.start(Life())
    serve(machine, [0, 0])
    machine.finish("a")
    machine.settle()
    machine.reset("a")
    serve(machine, [1] * 4, "lost")


def a_snapshot_is_as_old_as_its_number(machine):
    machine.start(Life())
    serve(machine, [1, 1])
    serve(machine, [0, 0])


def what_is_salted_goes_unsaid_and_the_rest_does_not(machine):
    machine.start(Life(kept=10**6))
    machine.serve("a", [0, 0], SPACES[2], close=False, fate="arrives")
    serve(machine, [0] * 6)
    running = machine.lives["a"].running
    running.reverse()
    machine.finish("a")
    serve(machine, [1] * 8)


def a_new_life_that_goes_on_with_the_next_number_is_asked_for(machine):
    machine.start(PLAIN)
    serve(machine, [0, 1])
    machine.restart("a", PLAIN)
    serve(machine, [0, 0], "lost")
    serve(machine, [1, 1])


def the_next_number_of_a_life_before_comes_too_late(machine):
    machine.start(PLAIN)
    for fate in ("arrives", "arrives", "waits"):
        serve(machine, [len(machine.prompts), 1], fate)
    machine.restart("a", PLAIN)
    serve(machine, [1, 0])
    machine.settle()
    serve(machine, [1, 0, 1, 1])
    machine.come_late("a", 2)


def an_answer_that_begins_late_may_be_of_another_life(machine):
    machine.start(Life(plain=True))
    serve(machine, [0, 1])
    machine.restart("a", Life(plain=True))
    serve(machine, [0, 0], "lost")
    serve(machine, [1, 1])


def a_new_life_that_cannot_be_asked_is_not_taken_for_the_old(machine):
    machine.start(PLAIN)
    serve(machine, [0, 1])
    machine.restart("a", Life(plain=True))
    serve(machine, [1, 1], "lost")
    serve(machine, [0, 0])
    machine.give_up("a")


PROGRAMS = (
    a_new_life_that_cannot_be_asked_is_not_taken_for_the_old,
    a_new_life_that_goes_on_with_the_next_number_is_asked_for,
    the_next_number_of_a_life_before_comes_too_late,
    an_answer_that_begins_late_may_be_of_another_life,
    what_is_lost_while_an_answer_is_made_is_in_neither,
    a_snapshot_after_a_clearing_that_was_lost_clears,
    a_snapshot_is_as_old_as_its_number,
    what_is_salted_goes_unsaid_and_the_rest_does_not,
    a_batch_that_clears_twice_is_no_snapshot,
    a_window_looks_past_what_is_gone,
    a_window_that_is_alone_is_known_too,
    a_window_sees_all_that_it_says,
    a_snapshot_may_tell_of_windows_first,
    a_group_of_a_life_before_is_not_waited_for,
    what_comes_late_from_a_life_before_is_asked_for_once,
    a_number_from_the_time_is_no_newer_for_being_higher,
    a_life_that_has_said_nothing_is_not_taken_for_the_one_before,
    an_answer_of_a_life_before_is_followed_by_the_new_life,
    a_batch_lost_while_an_answer_is_under_way_is_asked_for,
    a_new_life_with_the_next_number_is_not_taken_for_the_old,
    a_repeat_is_no_new_life,
    what_may_have_gone_since_is_forgotten,
)


def what_is_out_of_the_tree_is_not_followed(machine):
    for path in ("02", "03"):
        machine.store("C", path)
    for who in ("B", "A"):
        machine.store(who, "01")
    for who in ("A", "B"):
        machine.remove(who, "0")  # and what follows it, whose name stays known
    machine.store_in_window("A", "010")
    machine.remove_from_window("A", "010")


def what_is_out_of_the_tree_takes_no_other_with_it(machine):
    machine.store("C", "0")
    for who in ("B", "A"):
        machine.store(who, "01")
    for who in ("A", "B"):
        machine.remove(who, "0")
    machine.store_in_window("A", "010")
    machine.store("C", "01", 1)
    machine.remove_from_window("A", "010")


def what_is_told_again_is_followed_again(machine):
    what_is_out_of_the_tree_takes_no_other_with_it(machine)
    machine.store("A", "011")
    machine.remove("A", "01")


def what_follows_a_block_that_is_gone_is_not_held_when_that_comes_back(machine):
    machine.store_in_window("C", "1")
    for who in "AB":
        machine.store(who, "01")
    machine.remove("A", "0")
    machine.store("A", "010", 2)
    machine.store("A", "01")


def what_one_window_lets_go_of_another_still_holds(machine):
    for width in (2, 4):
        machine.store_in_window("A", "0", width)
        machine.store_in_window("A", "01", width)
    machine.remove_from_window("A", "0", 4)
    machine.it_says_what_was_told()
    machine.remove_from_window("A", "01", 2)


INDEX_PROGRAMS = (
    what_follows_a_block_that_is_gone_is_not_held_when_that_comes_back,
    what_one_window_lets_go_of_another_still_holds,
    what_is_out_of_the_tree_is_not_followed,
    what_is_out_of_the_tree_takes_no_other_with_it,
    what_is_told_again_is_followed_again,
)


def what_is_far_alone_is_not_counted(machine):
    machine.store()
    machine.copy("far")
    machine.remove("cache")


def what_goes_far_away_stays_near_by(machine):
    machine.store()
    machine.copy("disk")
    machine.remove("cache")
    machine.remove("far")


def what_one_tier_drops_another_of_its_medium_still_has(machine):
    machine.store(session="one")
    for tier in ("disk", "a second disk"):
        machine.copy(tier)
    machine.remove("cache")
    machine.remove("disk")
    machine.it_counts_what_is_near()
    machine.store(session="two")
    machine.remove("cache")


TIER_PROGRAMS = (
    what_is_far_alone_is_not_counted,
    what_goes_far_away_stays_near_by,
    what_one_tier_drops_another_of_its_medium_still_has,
)
