"""The protocol of loads, leases, transfers and tiers as a small state machine, explored to its end.

Two nodes. Node 0 has computed content A and gives it away on request; node 1 runs two requests on
two blocks, with a tier behind them (host memory, or a disk that survives a crash) that has room for
one record. A request finds its content cached, computes it, reads it from the tier, or asks node 0
for it. As often as they like, messages are late, node 0 reuses its block or starts again, perhaps
with other ranks, and a record is corrupted or cannot be read. At most once each, a message is lost,
one is repeated, a request is aborted, and node 1 crashes and starts again, perhaps with another
layout.

Rules:

- everything is asked for by content: tokens, namespace, layout; what arrives is compared with what
  was asked for, and is found only then;
- the target of a transfer is leased until nothing can write to it any more: until the bytes have
  arrived, or its connection is closed; a deadline or an abort does not free it;
- the source of a transfer is leased, and a record that is read is pinned, until it has ended;
- every wait has a deadline, after which a request goes another way, with nothing in its hands.

`explore` visits every state. Safety is a statement about each state and step; liveness: from each
state all requests can end without further faults, and nothing stays held. `BUGS` names the broken
variants, most of them bugs that engines have shipped; each must be rejected.

    python -m tests.simulation.specification      # everything, some minutes
"""

import gc
import sys
import time
from typing import NamedTuple

FAULTS = ("lose", "repeat", "crash", "abort")
_BIT = {fault: 1 << number for number, fault in enumerate(FAULTS)}
_CAPACITY = 1  # records of the tier
_NONE = ("none", -1)
_EMPTY = ("", "")
_OPEN = {"wanted", "cut", "freed"}  # something may still write to the target
_LEASED = {"wanted", "cut"}

BUGS = {  # the faults that show it, and what it is
    "found_before_it_is_there": ("", "a load is found when it begins (P38)"),
    "keeps_the_old_name": ("", "a block that is loaded into is still found as what it was (A3)"),
    "freed_at_the_deadline": ("", "the target of a late transfer is handed out (P38, A8)"),
    "freed_at_the_abort": (
        "abort",
        "an abort gives back what a transfer still writes (vllm#46453)",
    ),
    "computes_into_a_leased_block": ("", "a request takes a block that a load writes to (P17)"),
    "second_arrival": ("repeat", "a repeated message is written once more (P38)"),
    "arrival_after_the_end": (
        "",
        "what was cut off is given to its request all the same (vllm#46283)",
    ),
    "unchecked_arrival": ("", "bytes of other content are taken for those asked for (vllm#52234)"),
    "other_ranks": ("", "bytes of the right tokens in another cut are taken (sglang#23746)"),
    "no_deadline": ("lose", "a lost message is waited for without end (vllm#50754)"),
    "no_fence": ("lose", "a lost message leaves its block leased for ever (LMCache#4676)"),
    "stays_after_a_failure": ("", "a load that fails is not tried in another way (vllm#50687)"),
    "one_waits_for_another": (
        "",
        "a request waits for another's load that is cut off (vllm#45388)",
    ),
    "waits_with_its_block": ("", "requests that wait for blocks keep theirs (sglang#27024)"),
    "restart_keeps_names": ("crash", "after a crash blocks are found as before (P37)"),
    "source_without_lease": ("", "what is written back is reused meanwhile (LMCache#4492)"),
    "record_before_it_is_whole": ("", "a record is read while it is written (P38)"),
    "torn_record": ("crash", "a record that a crash cut short is served (Rapid-MLX#187)"),
    "unchecked_record": ("", "a flipped byte is served (vllm#54363)"),
    "other_layout": ("crash", "a record of another layout is served (vllm#55904)"),
    "ignores_the_salt": (
        "",
        "a record of the same tokens is served to another tenant (sglang#37160)",
    ),
    "lost_in_silence": ("", "a write to a full disk counts as done (mooncake#3741)"),
    "written_never_read": (
        "crash",
        "records are found under the names of one process only (vllm#47636)",
    ),
    "evicts_what_is_read": ("", "a record goes while it is read (LMCache#3130)"),
    "leaks_the_pin": ("abort", "an abort leaves a record pinned (LMCache#1034)"),
    "never_deletes": ("", "the tier grows without end (vllm#52784)"),
    "forgets_its_size": ("crash", "what a tier holds is not counted after a restart (vllm#54779)"),
}


class State(NamedTuple):
    """Everything. Blocks are `(content, found as)`; contents are "A", "B", or anything else."""

    blocks: tuple  # of node 1
    requests: tuple  # (phase, block, ways tried)
    transfers: tuple  # (status, target): what each request asks node 0 for, then its reads
    messages: tuple  # (what, request), sorted
    source: tuple  # node 0: (content, found as, request that it is leased for)
    records: tuple  # of the tier: (name, status), sorted
    writing: tuple  # (name, block): what is being written to the tier
    is_new: bool  # node 1 has started again


class Specification:
    """The steps.

    Args:
        wanted: the content that each request wants.
        recorded: of which the tier has records at first.
        bug: one of `BUGS`, or None.
    """

    def __init__(self, wanted, recorded=(), bug=None):
        self.wanted, self.recorded, self.bug = wanted, recorded, bug
        self._parts = {}  # of states: equal ones are kept once

    def start(self):
        """Nothing has happened; node 0 has A."""
        requests = (("waiting", -1, ""),) * len(self.wanted)
        return State(
            (_EMPTY, _EMPTY), requests, (_NONE,) * 2 * len(requests), (), ("A", "A", -1),
            tuple([(name, "whole") for name in self.recorded]), (), False,
        )  # fmt: skip

    def free(self, state):
        """The blocks that may be taken: nothing holds them and nothing may still write them."""
        held = {block for _, block, _ in state.requests}
        if self.bug != "computes_into_a_leased_block":
            held |= {target for status, target in state.transfers if status in _LEASED}
        if self.bug != "source_without_lease":
            held |= {block for _, block in state.writing}
        return [block for block in range(len(state.blocks)) if block not in held]

    def steps(self, state, faults=FAULTS):
        """Every step: `(its name, its fault or "", the state after it)`."""
        found = []
        for number, request in enumerate(state.requests):
            self._of_request(found, state, number, *request)
            if "abort" in faults and request[0] != "done":
                gone = self._cut(_request(state, number, "done"), number, "freed_at_the_abort")
                found.append((f"abort {number}", "abort", gone))
        for slot, (status, target) in enumerate(state.transfers):
            if status in _LEASED:
                self._of_transfer(found, state, slot, status, target)
        for message in dict.fromkeys(state.messages):
            self._of_message(found, state, faults, *message)
        self._of_node_0(found, state)
        self._of_tier(found, state)
        if "crash" in faults:
            found += [("crash", "crash", self._crashed(state, is_same)) for is_same in (0, 1)]
        return found

    def _of_request(self, found, state, number, phase, block, _):
        want = self.wanted[number]
        if phase == "waiting":
            self._of_waiting(found, state, number, want)
        elif phase == "computing":
            made = _block(state, block, (want, want))
            found.append((f"computed {number}", "", _request(made, number, "ready", block)))
        elif phase == "ready":
            found.append((f"done {number}", "", _request(state, number, "done")))

    def _of_waiting(self, found, state, number, want):
        tried = state.requests[number][2]
        for place, (_, name) in enumerate(state.blocks):
            if name == want:
                found.append((f"hit {number}", "", _request(state, number, "ready", place)))
        if self.bug == "one_waits_for_another":
            for slot, (status, _) in enumerate(state.transfers):
                other = slot % len(self.wanted)
                if status == "wanted" and self.wanted[other] == want and other != number:
                    found.append((f"follow {number}", "", _request(state, number, "following")))
        free = self.free(state)
        if not free:
            return
        place = free[0]
        computing = _request(_block(state, place, _EMPTY), number, "computing", place)
        found.append((f"compute {number}", "", computing))
        if "p" not in tried and state.transfers[number][0] == "none":
            begun = self._begun(state, number, number, place, tried + "p")
            found.append((f"ask {number}", "", _sent(begun, "ask", number)))
        slot = number + len(self.wanted)
        if "t" not in tried and state.transfers[slot][0] == "none" and self._reads(state, want):
            begun = self._begun(state, number, slot, place, tried + "t")
            found.append((f"read {number}", "", begun))

    def _reads(self, state, want):
        """The status of the record that a read of some content would use; "": there is none."""
        status = dict(state.records).get(want, "")
        usable = {"whole", "flipped", "hollow"}  # a flipped byte is seen when all has been read
        usable |= {"writing"} if self.bug == "record_before_it_is_whole" else set()
        usable |= {"torn"} if self.bug == "torn_record" else set()
        usable |= {"old"} if self.bug == "other_layout" else set()
        if self.bug == "ignores_the_salt":
            status = status or ("other" if state.records else "")
            usable |= {"other"}
        if self.bug == "written_never_read" and state.is_new:
            return ""
        return status if status in usable else ""

    def _begun(self, state, number, slot, place, tried):
        """A load takes a block, which is found as nothing until all has arrived."""
        name = {"found_before_it_is_there": self.wanted[number],
                "keeps_the_old_name": state.blocks[place][1]}.get(self.bug, "")  # fmt: skip
        state = _block(state, place, (state.blocks[place][0], name))
        state = _transfer(state, slot, "wanted", place)
        requests = list(state.requests)
        requests[number] = ("loading", -1, tried)
        return state._replace(requests=tuple(requests))

    def _cut(self, state, number, frees):
        """A request no longer waits for its loads; their targets stay leased."""
        for slot in (number, number + len(self.wanted)):
            status, target = state.transfers[slot]
            if status == "wanted":
                status = "freed" if self.bug == frees else "cut"
                is_read = slot >= len(self.wanted)
                if is_read and frees == "freed_at_the_abort" and self.bug == "leaks_the_pin":
                    status = "leaked"
                state = _transfer(state, slot, status, target)
        return state

    def _of_transfer(self, found, state, slot, status, target):
        number = slot % len(self.wanted)
        want = self.wanted[number]
        if status == "wanted" and self.bug != "no_deadline":
            late = self._cut(self._waits(state, number, target), number, "freed_at_the_deadline")
            found.append((f"deadline {number}", "", late))
        if slot >= len(self.wanted):  # a read of the tier ends by itself, when it is fenced too
            content = want if self._reads(state, want) == "whole" else "wrong"
            if self.bug == "unchecked_record" and content == "wrong":
                content = want + "?"
            found.append((f"loaded {number}", "", self._arrived(state, slot, content)))
            found.append((f"unreadable {number}", "", self._failed(state, slot)))
        elif status == "cut" and self.bug != "no_fence":
            found.append((f"fence {number}", "", _transfer(state, slot, *_NONE)))

    def _waits(self, state, number, target):
        """A request tries another way."""
        held = target if self.bug == "waits_with_its_block" else -1
        requests = list(state.requests)
        requests[number] = ("waiting", held, requests[number][2])
        return state._replace(requests=tuple(requests))

    def _arrived(self, state, slot, content):
        """Bytes are in the target; they count if they are what was asked for and still wanted."""
        number = slot % len(self.wanted)
        want, (status, target) = self.wanted[number], state.transfers[slot]
        is_right = content == want or (
            {"unchecked_arrival": slot == number, "other_ranks": content == want.lower(),
             "unchecked_record": content == want + "?"}.get(self.bug)
            or (self.bug in ("record_before_it_is_whole", "torn_record", "other_layout",
                            "ignores_the_salt") and slot != number)
        )  # fmt: skip
        if not is_right:
            return self._failed(_block(state, target, _EMPTY), slot)
        is_late = status != "wanted"
        end = ("freed", target) if self.bug == "second_arrival" and slot == number else _NONE
        state = _transfer(state, slot, *end)
        if is_late and self.bug != "arrival_after_the_end":
            return _block(state, target, _EMPTY)
        for other, (phase, *_) in enumerate(state.requests):
            if phase == "following":
                state = _request(state, other, "waiting")
        return _request(_block(state, target, (content, want)), number, "ready", target)

    def _failed(self, state, slot):
        """A load ends without its bytes: its request goes another way."""
        number, (status, target) = slot % len(self.wanted), state.transfers[slot]
        state = _transfer(state, slot, *_NONE)
        if status != "wanted" or self.bug == "stays_after_a_failure":
            return state
        return self._waits(state, number, target)

    def _of_message(self, found, state, faults, what, number):
        left = list(state.messages)
        left.remove((what, number))
        after = state._replace(messages=tuple(left))
        if "lose" in faults:
            found.append((f"lose {what} {number}", "lose", after))
        if "repeat" in faults:
            found.append((f"repeat {what} {number}", "repeat", _sent(state, what, number)))
        found.append((f"{what} {number}", "", self._taken(after, what, number)))

    def _taken(self, state, what, number):
        content, name, lease = state.source
        if what == "ask":  # at node 0: is it there, by content?
            if name != self.wanted[number] or lease not in (-1, number):
                return _sent(state, "miss", number)
            return _sent(state._replace(source=(content, name, number)), "data", number)
        if lease == number:
            state = state._replace(source=(content, name, -1))
        status, target = state.transfers[number]
        if status == "freed":  # written to whatever is there now
            return _block(state, target, (content, state.blocks[target][1]))
        if status not in _LEASED:
            return state
        return (
            self._failed(state, number) if what == "miss" else self._arrived(state, number, content)
        )

    def _of_node_0(self, found, state):
        content, name, lease = state.source
        if lease != -1:  # it ends by time: what is read then is compared
            found.append(("lease ends", "", state._replace(source=(content, name, -1))))
        elif name != "X":
            found.append(("node 0 reuses", "", state._replace(source=("X", "X", -1))))
        if content == "A":  # with other ranks it cuts heads otherwise
            found.append(("node 0 restarts", "", state._replace(source=("a", "A", -1))))

    def _crashed(self, state, is_same):
        """Memory is gone, connections are closed, clients ask again; the tier stays."""
        keeps = self.bug == "restart_keeps_names"
        blocks = tuple(("", name if keeps else "") for _, name in state.blocks)
        requests = tuple(r if r[0] == "done" else ("waiting", -1, "") for r in state.requests)
        kept = {"whole": "whole" if is_same else "old", "writing": "torn"}
        records = tuple((name, kept.get(status, status)) for name, status in state.records)
        return State(
            blocks, requests, (_NONE,) * len(state.transfers), (), state.source, records, (), True
        )

    def _of_tier(self, found, state):  # noqa: C901  # one branch a step
        read = {
            self.wanted[slot - len(self.wanted)]
            for slot, (status, _) in enumerate(state.transfers)
            if slot >= len(self.wanted) and status != "none"
        }
        records = dict(state.records)
        for block, (_, name) in enumerate(state.blocks):
            if not name or records.get(name) in ("whole", "writing", "flipped"):
                continue
            if name in read:
                continue
            left = {n: s for n, s in records.items() if n != name}
            victims = [n for n, s in left.items() if s != "writing"]
            if self.bug != "evicts_what_is_read":
                victims = [n for n in victims if n not in read]
            grows = self.bug == "never_deletes" or (self.bug == "forgets_its_size" and state.is_new)
            while len(left) >= _CAPACITY and victims and not grows:
                del left[victims.pop()]
            if len(left) < _CAPACITY or grows:
                after = _records(state, {**left, name: "writing"})
                writing = (*state.writing, (name, block))
                found.append((f"store {name}", "", after._replace(writing=writing)))
        for name, place in state.writing:
            after = state._replace(writing=tuple(w for w in state.writing if w[0] != name))
            content = state.blocks[place][0]
            whole = "whole" if content == name else "flipped"
            found.append((f"stored {name}", "", _records(after, {**records, name: whole})))
            full = {n: s for n, s in records.items() if n != name}
            if self.bug == "lost_in_silence":
                full[name] = "hollow"
            found.append((f"full {name}", "", _records(after, full)))
        for name, status in state.records:
            if status == "whole":
                flipped = _records(state, {**records, name: "flipped"})
                found.append((f"corrupt {name}", "", flipped))

    def broken(self, state):  # noqa: C901, PLR0912  # one branch a rule
        """The rule that a state breaks; None: none."""
        targets = [target for status, target in state.transfers if status in _OPEN]
        held = [block for _, block, _ in state.requests if block >= 0]
        for place, (content, name) in enumerate(state.blocks):
            if name and content != name:
                return f"block {place} has {content!r} and is found as {name}"
        for number, (phase, block, _) in enumerate(state.requests):
            if phase == "ready" and state.blocks[block][0] != self.wanted[number]:
                return f"request {number} reads {state.blocks[block][0]!r}"
            if phase == "computing" and held.count(block) > 1:
                return f"block {block} is computed and held by another request"
        for place in targets:
            if state.blocks[place][1]:
                return f"block {place} is found while a transfer may write to it"
            if targets.count(place) > 1 or any(
                block == place and phase != "waiting" for phase, block, _ in state.requests
            ):
                return f"block {place} is used while a transfer may write to it"
        for _, place in state.writing:
            if place in targets or ("computing", place) in [r[:2] for r in state.requests]:
                return f"block {place} is reused while it is written to the tier"
        records = dict(state.records)
        if len(records) > _CAPACITY:
            return f"the tier has {len(records)} records"
        if "hollow" in records.values():
            return "a record counts as whole and has no bytes"
        for slot, (status, _) in enumerate(state.transfers[len(self.wanted) :]):
            if (
                status in _OPEN
                and self.wanted[slot] not in records
                and self.bug != "ignores_the_salt"
            ):
                return f"the record that request {slot} reads is gone"
        return None

    def wrong(self, state, name, after):
        """The rule that a step breaks; None: none."""
        for number, (phase, *_) in enumerate(state.requests):
            if phase == "done" and after.requests[number][0] != "done":
                return f"request {number} has ended, and goes on: {name}"
        return None

    def owed(self, state):
        """The names of steps that there must be: what a tier or cache has can be used (P24)."""
        records, free, owed = dict(state.records), self.free(state), set()
        for number, (phase, _, tried) in enumerate(state.requests):
            want, slot = self.wanted[number], number + len(self.wanted)
            if phase != "waiting":
                continue
            if any(name == want for _, name in state.blocks):
                owed.add(f"hit {number}")
            if "t" not in tried and free and state.transfers[slot][0] == "none":
                owed |= {f"read {number}"} if records.get(want) == "whole" else set()
        return owed

    def is_over(self, state):
        """All requests have ended, and nothing is held for anything."""
        return (
            all(request[0] == "done" for request in state.requests)
            and all(status in ("none", "freed") for status, _ in state.transfers)
            and not state.writing
        )

    def plain(self, state):
        """The same state without what nothing looks at any more, its blocks in order."""
        transfers = state.transfers
        if any(status == "freed" for status, _ in transfers):
            coming = {number for _, number in state.messages}
            transfers = tuple(
                _NONE if t[0] == "freed" and n not in coming else t for n, t in enumerate(transfers)
            )
        used = {r[1] for r in state.requests} | {t[1] for t in transfers}
        used |= {place for _, place in state.writing}
        blocks = [
            block if block[1] or place in used else _EMPTY
            for place, block in enumerate(state.blocks)
        ]
        source = state.source
        if (
            not state.messages
            and source[2] == -1
            and not any(
                phase in ("waiting", "loading") and "p" not in tried and want == "A"
                for (phase, _, tried), want in zip(state.requests, self.wanted, strict=True)
            )
        ):
            source = ("X", "X", -1) if source[1] != "X" else source
        state = state._replace(blocks=tuple(blocks), transfers=transfers, source=source)
        if blocks[0] < blocks[1] or (
            blocks[0] == blocks[1] and _users(state, 0) <= _users(state, 1)
        ):
            return self._kept(state)
        swap = {0: 1, 1: 0, -1: -1}
        swapped = state._replace(
            blocks=(blocks[1], blocks[0]),
            requests=tuple([(phase, swap[block], t) for phase, block, t in state.requests]),
            transfers=tuple([(status, swap[target]) for status, target in transfers]),
            writing=tuple([(name, swap[block]) for name, block in state.writing]),
        )
        return self._kept(swapped)

    def _kept(self, state):
        parts = self._parts
        return State(*[parts.setdefault(part, part) for part in state])


def _users(state, place):
    return (
        [r[1] == place for r in state.requests],
        [t[1] == place for t in state.transfers],
        [w[1] == place for w in state.writing],
    )


def _request(state, number, phase, block=-1):
    requests = list(state.requests)
    requests[number] = (phase, block, "")
    return state._replace(requests=tuple(requests))


def _block(state, place, block):
    blocks = list(state.blocks)
    blocks[place] = block
    return state._replace(blocks=tuple(blocks))


def _transfer(state, slot, status, target):
    transfers = list(state.transfers)
    transfers[slot] = (status, target)
    return state._replace(transfers=tuple(transfers))


def _sent(state, what, number):
    return state._replace(messages=tuple(sorted((*state.messages, (what, number)))))


def _records(state, records):
    return state._replace(records=tuple(sorted(records.items())))


class Explored(NamedTuple):
    """What came of a search: how many states, what is wrong (None: nothing), the steps to it."""

    num_states: int
    wrong: str | None = None
    path: tuple = ()


def explore(specification, faults=FAULTS, note=None):  # noqa: C901  # one loop
    """Visit every state, those after few faults first; `Explored`. Stops at what is wrong.

    Args:
        specification: the steps.
        faults: which may come.
        note: is called with every step: the state before, its name, the state after.
    """
    everything = sum(_BIT[fault] for fault in faults)
    groups = {everything: {specification.start(): None}}  # by the faults left: states, their paths
    count = 0
    for left in sorted(_parts(everything), key=int.bit_count, reverse=True):
        came, faults = groups.pop(left, {}), {fault for fault in FAULTS if left & _BIT[fault]}
        states, numbers, after = list(came), {state: n for n, state in enumerate(came)}, []
        for state in states:  # it grows
            count += 1
            path, nexts, names = came[state], [], set()
            wrong = specification.broken(state)
            for name, fault, changed in () if wrong else specification.steps(state, faults):
                names.add(name)
                if fault and fault not in faults:
                    continue
                wrong = wrong or specification.wrong(state, name, changed)
                plain = specification.plain(changed)
                if note is not None:
                    note(state, name, changed)
                if fault:
                    groups.setdefault(left ^ _BIT[fault], {}).setdefault(plain, (name, path))
                    continue
                if plain not in came:
                    came[plain], numbers[plain] = (sys.intern(name), path), len(states)
                    states.append(plain)
                nexts.append(numbers[plain])
            if not wrong and (missing := specification.owed(state) - names):
                wrong = f"cannot happen, though it should: {missing}"
            if wrong:
                return Explored(count, wrong, _steps(path))
            after.append(nexts)
        stuck = _stuck(specification, states, after)
        if stuck is not None:
            why = "from here requests never end, or something stays held"
            return Explored(count, why, _steps(came[stuck]))
    return Explored(count)


def _stuck(specification, states, after):
    """A state from which the end cannot be reached; None: there is none."""
    before = [[] for _ in states]
    for number, nexts in enumerate(after):
        for one in nexts:
            before[one].append(number)
    waiting = [number for number, state in enumerate(states) if specification.is_over(state)]
    good = bytearray(len(states))
    while waiting:
        number = waiting.pop()
        if not good[number]:
            good[number] = 1
            waiting += before[number]
    return next((state for state, is_good in zip(states, good, strict=True) if not is_good), None)


def _parts(mask):
    part = mask
    while part:
        yield part
        part = (part - 1) & mask
    yield 0


def _steps(path):
    steps = []
    while path is not None:
        name, path = path
        steps.append(name)
    return tuple(steps[::-1])


SCOPES = (("AB", "B"), ("AA", ""))  # what is wanted, and recorded at first


def rejected(bug):
    """The search that finds a broken variant wrong; None: none does."""
    for wanted, recorded in SCOPES:
        found = explore(Specification(wanted, recorded, bug), BUGS[bug][0].split())
        if found.wrong:
            return found
    return None


def main():
    """Explore the right one, then every broken one; 1: something is not as it should be."""
    is_good = True
    gc.disable()  # nothing here has circles
    for wanted, recorded in SCOPES:
        began_s = time.process_time()
        found = explore(Specification(wanted, recorded))
        is_good &= found.wrong is None
        print(f"{wanted}: {found} {time.process_time() - began_s:.0f} s", flush=True)  # noqa: T201
    for bug in BUGS:
        began_s = time.process_time()
        found = rejected(bug)
        is_good &= found is not None
        print(f"{bug}: {found} {time.process_time() - began_s:.1f} s", flush=True)  # noqa: T201
    return not is_good


if __name__ == "__main__":
    sys.exit(main())
