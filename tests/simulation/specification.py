"""The protocol of loads, leases, transfers and tiers as a small state machine, explored to its end.

Two nodes. Node 0 has computed content A and gives it away on request; node 1 runs two requests on
two blocks, with a tier of its own behind them (host memory or a disk that survives a crash). A
request finds its content cached, computes it, loads it from the tier, or asks node 0 for it, by
content. Messages are lost, repeated and late; node 0 reuses or loses its block; node 1 crashes; a
record of the tier is corrupted or cannot be read; requests are aborted. Each fault comes at most
once.

Rules:

- a transfer's target is leased until nothing can write to it any more: until it has arrived, or the
  connection was fenced off; a deadline or an abort alone does not free it;
- what arrives is checked against what was asked for, and can be found only then;
- every wait has a deadline, after which a request computes.

`explore` visits every state. Safety is a statement about each state; liveness says that from each
of them, if no more faults come, all requests can end and nothing stays leased. `BUGS` names the
broken variants; each must be rejected.
"""

from collections import deque
from typing import NamedTuple

WANTED = ("A", "B")  # what the two requests want; the second one also tries A
FAULTS = ("lose", "repeat", "restart", "crash", "abort", "corrupt", "unreadable")


class Block(NamedTuple):
    """A block of node 1: its bytes, and what it can be found as (None: not at all)."""

    content: str
    name: str | None


class Request(NamedTuple):
    """A request: its phase, the block that it holds, and which ways it has tried."""

    phase: str  # waiting, loading, computing, ready, done
    block: int = -1
    asked: bool = False
    read: bool = False


class Transfer(NamedTuple):
    """A load into a block of node 1, of request `owner`."""

    kind: str  # peer, tier
    owner: int
    target: int
    state: str  # asked, sent, cut, ended


class State(NamedTuple):
    """Everything."""

    blocks: tuple
    requests: tuple
    transfers: tuple
    messages: tuple  # (what, transfer), sorted
    source: Block  # of node 0
    source_lease: int  # the transfer that holds it; -1: none
    tier: tuple  # (name, status, content), sorted
    writing: tuple  # (name, block): what is being written back
    faults: frozenset  # that may still come


BUGS = {
    "found_before_it_is_there": "a load is found when it begins (P38)",
    "freed_at_the_deadline": "the target of a late transfer is handed out (P38, A8)",
    "freed_at_the_abort": "an abort gives back what a transfer still writes (vllm#45388)",
    "no_deadline": "a lost message is waited for without end (vllm#50754, sglang#23746)",
    "no_fence": "a lost message leaves its block leased for ever (LMCache#4676)",
    "unchecked_arrival": "bytes of other content are taken for those asked for (vllm#52234)",
    "second_arrival": "a repeated message is written once more",
    "arrival_after_the_end": "what was cut off is committed to its request all the same",
    "record_before_it_is_whole": "a record is found while it is written (P38)",
    "torn_record": "a record that a crash cut short is served (Rapid-MLX#187)",
    "unchecked_record": "a flipped byte is served (vllm#54363)",
    "source_without_lease": "what is written back is reused meanwhile (LMCache#4492)",
    "stays_after_a_failure": "a load that fails is not tried in another way (vllm#50687)",
    "miss_without_answer": "a node that has nothing does not answer, and nobody asks again",
    "keeps_old_name": "a block that is loaded into is still found as what it was",
    "one_wait_for_another": "a request waits for another's load of the same content without end",
    "computes_into_a_leased_block": "a request takes a block that a load writes to (A1)",
    "restart_keeps_names": "after a crash blocks are found as before (P37)",
}


_EMPTY = Block("empty", None)
_GONE = Transfer("", -1, -1, "ended")


class Specification:
    """The transitions. `wanted`: of each request; `bug`: one of `BUGS`, or None."""

    def __init__(self, wanted=WANTED, bug=None):
        self.wanted, self.bug = wanted, bug

    def start(self):
        """Nothing has happened; node 0 has A."""
        return State(
            (_EMPTY, _EMPTY), tuple(Request("waiting") for _ in self.wanted), (), (),
            Block("A", "A"), -1, (), (), frozenset(FAULTS),
        )  # fmt: skip

    def is_free(self, state, block):
        """Whether a block may be taken: no request holds it, and nothing may still write it."""
        leased = any(t.target == block and t.state != "ended" for t in state.transfers)
        if self.bug == "computes_into_a_leased_block":
            leased = False
        stored = any(place == block for _, place in state.writing)
        if self.bug == "source_without_lease":
            stored = False
        return not leased and not stored and all(r.block != block for r in state.requests)

    def steps(self, state):
        """Every transition: `(its name, whether it is a fault, the state after it)`."""
        for number, request in enumerate(state.requests):
            yield from self._of_request(state, number, request)
        for number, transfer in enumerate(state.transfers):
            yield from self._of_transfer(state, number, transfer)
        for message in dict.fromkeys(state.messages):
            yield from self._of_message(state, message)
        yield from self._of_nodes(state)
        yield from self._of_tier(state)

    def _of_request(self, state, number, request):
        want = self.wanted[number]
        if request.phase == "waiting":
            yield from self._of_waiting(state, number, request, want)
        elif request.phase == "computing":
            made = _block(state, request.block, Block(want, want))
            yield f"computed {number}", False, _request(made, number, request._replace(phase="ready"))
        elif request.phase == "ready":
            yield f"done {number}", False, _request(state, number, Request("done"))
        if request.phase != "done" and "abort" in state.faults:
            gone = _request(_spent(state, "abort"), number, Request("done"))
            yield f"abort {number}", True, self._cut(gone, number, "freed_at_the_abort")

    def _of_waiting(self, state, number, request, want):
        for place, block in enumerate(state.blocks):
            if block.name == want:
                ready = request._replace(phase="ready", block=place)
                yield f"hit {number}", False, _request(state, number, ready)
        loads = any(
            t.state != "ended" and self.wanted[t.owner] == want and t.owner != number
            for t in state.transfers
        )
        if self.bug == "one_wait_for_another" and loads:
            return
        free = [place for place in range(len(state.blocks)) if self.is_free(state, place)]
        if not free:
            return
        place = free[0]
        taken = _block(state, place, Block("torn", None))
        held = request._replace(phase="computing", block=place)
        yield f"compute {number}", False, _request(taken, number, held)
        loading = request._replace(phase="loading")
        if not request.asked:
            begun = self._begin(state, number, loading._replace(asked=True), place, "peer")
            message = ("ask", len(state.transfers))
            yield f"ask {number}", False, _sent(begun, message)
        records = {name: status for name, status, _ in state.tier}
        usable = {"whole"} | ({"writing"} if self.bug == "record_before_it_is_whole" else set())
        usable |= {"torn"} if self.bug == "torn_record" else set()
        if not request.read and records.get(want) in usable:
            begun = self._begin(state, number, loading._replace(read=True), place, "tier")
            yield f"read {number}", False, begun

    def _begin(self, state, number, request, place, kind):
        """A load takes a block, which is found as nothing until the load has ended."""
        name, content = None, state.blocks[place].content
        if self.bug == "found_before_it_is_there":
            name = self.wanted[number]
        if self.bug == "keeps_old_name":
            name = state.blocks[place].name
        begun = _request(_block(state, place, Block(content, name)), number, request)
        transfer = Transfer(kind, number, place, "asked")
        return begun._replace(transfers=(*begun.transfers, transfer))

    def _cut(self, state, number, frees):
        """A request no longer waits for its load; the target stays leased."""
        end = "ended" if self.bug == frees else "cut"
        transfers = [
            t._replace(state=end) if t.owner == number and t.state in ("asked", "sent") else t
            for t in state.transfers
        ]
        return state._replace(transfers=tuple(transfers))

    def _of_transfer(self, state, number, transfer):
        if transfer.kind == "tier":
            if transfer.state in ("asked", "cut"):
                found = next(c for n, _, c in state.tier if n == self.wanted[transfer.owner])
                yield f"loaded {number}", False, self._arrived(state, number, found)
                if "unreadable" in state.faults:
                    spent = _spent(state, "unreadable")
                    yield f"unreadable {number}", True, self._failed(spent, number)
            return
        if transfer.state in ("asked", "sent") and self.bug != "no_deadline":
            owner = transfer.owner
            waiting = state.requests[owner]._replace(phase="waiting")
            late = _request(state, owner, waiting)
            yield f"deadline {owner}", False, self._cut(late, owner, "freed_at_the_deadline")
        if transfer.state == "cut" and self.bug != "no_fence":
            yield f"fence {number}", False, _transfer(state, number, "ended")

    def _arrived(self, state, number, content):
        """Bytes are in the target; they count if they are what was asked for and still wanted."""
        transfer = state.transfers[number]
        want = self.wanted[transfer.owner]
        state = _block(state, transfer.target, Block(content, None))
        unchecked = {"peer": "unchecked_arrival", "tier": "unchecked_record"}[transfer.kind]
        torn = self.bug in ("record_before_it_is_whole", "torn_record") and transfer.kind == "tier"
        if content != want and self.bug != unchecked and not torn:
            return self._failed(state, number)
        is_wanted = transfer.state in ("asked", "sent") or self.bug == "arrival_after_the_end"
        state = _transfer(state, number, "ended")
        if not is_wanted:
            return state
        ready = state.requests[transfer.owner]._replace(phase="ready", block=transfer.target)
        state = _block(state, transfer.target, Block(content, want))
        return _request(state, transfer.owner, ready)

    def _failed(self, state, number):
        """A load ends without its bytes: its request goes another way."""
        transfer = state.transfers[number]
        was_wanted = transfer.state in ("asked", "sent")
        state = _transfer(state, number, "ended")
        if not was_wanted or self.bug == "stays_after_a_failure":
            return state
        waiting = state.requests[transfer.owner]._replace(phase="waiting")
        return _request(state, transfer.owner, waiting)

    def _of_message(self, state, message):
        what, number = message
        left = list(state.messages)
        left.remove(message)
        after = state._replace(messages=tuple(left))
        if "lose" in state.faults:
            yield f"lose {what} {number}", True, _spent(after, "lose")
        if "repeat" in state.faults:
            yield f"repeat {what} {number}", True, _spent(_sent(state, message), "repeat")
        yield f"{what} {number}", False, self._taken(after, what, number)

    def _taken(self, state, what, number):
        transfer = state.transfers[number]
        if what == "ask":  # at node 0: is it there, by content?
            if state.source.name == self.wanted[transfer.owner] and state.source_lease in (-1, number):
                return _sent(state._replace(source_lease=number), ("data", number))
            return state if self.bug == "miss_without_answer" else _sent(state, ("miss", number))
        lease = -1 if state.source_lease == number else state.source_lease
        if transfer.state == "ended":
            if what == "data" and self.bug in (
                "second_arrival", "freed_at_the_deadline", "freed_at_the_abort",
            ):  # fmt: skip
                late = Block(state.source.content, state.blocks[transfer.target].name)
                return _block(state, transfer.target, late)
            return state
        if what == "miss":
            return self._failed(state, number)
        return self._arrived(state._replace(source_lease=lease), number, state.source.content)

    def _of_nodes(self, state):
        if state.source_lease == -1 and state.source.name != "X":
            yield "node 0 reuses", False, state._replace(source=Block("X", "X"))
        if state.source_lease != -1:  # its lease ends by time: what is read then is checked
            yield "lease ends", False, state._replace(source_lease=-1)
        if "restart" in state.faults:
            lost = _spent(state, "restart")._replace(source=Block("X", "X"), source_lease=-1)
            yield "node 0 restarts", True, lost
        if "crash" in state.faults:
            yield "node 1 crashes", True, self._crashed(_spent(state, "crash"))

    def _crashed(self, state):
        """Memory is gone, connections are closed; clients ask again; the tier stays."""
        keeps = self.bug == "restart_keeps_names"
        blocks = tuple(Block("empty", block.name if keeps else None) for block in state.blocks)
        requests = tuple(r if r.phase == "done" else Request("waiting") for r in state.requests)
        torn = {name for name, _ in state.writing}
        tier = tuple(
            (name, "torn", "torn") if name in torn else (name, status, content)
            for name, status, content in state.tier
        )
        ended = tuple(t._replace(state="ended") for t in state.transfers)
        return state._replace(
            blocks=blocks, requests=requests, tier=tier, writing=(), transfers=ended, messages=()
        )

    def _of_tier(self, state):
        known = {name for name, status, _ in state.tier if status != "torn"}
        for place, block in enumerate(state.blocks):
            if block.name is not None and block.name not in known and block.name in self.wanted:
                rest = tuple(record for record in state.tier if record[0] != block.name)
                tier = tuple(sorted((*rest, (block.name, "writing", "torn"))))
                writing = (*state.writing, (block.name, place))
                yield f"store {block.name}", False, state._replace(tier=tier, writing=writing)
        for name, place in state.writing:
            rest = tuple(record for record in state.tier if record[0] != name)
            whole = (name, "whole", state.blocks[place].content)
            writing = tuple(one for one in state.writing if one[0] != name)
            after = state._replace(tier=tuple(sorted((*rest, whole))), writing=writing)
            yield f"stored {name}", False, after
        if "corrupt" in state.faults:
            for name, status, _ in state.tier:
                if status == "whole":
                    rest = tuple(record for record in state.tier if record[0] != name)
                    tier = tuple(sorted((*rest, (name, status, "flipped"))))
                    yield f"corrupt {name}", True, _spent(state, "corrupt")._replace(tier=tier)

    def broken(self, state):
        """What is wrong with a state; None: nothing."""
        for place, block in enumerate(state.blocks):
            if block.name is not None and block.content != block.name:
                return f"block {place} has {block.content} and is found as {block.name}"
        for number, request in enumerate(state.requests):
            if request.phase == "ready":
                content = state.blocks[request.block].content
                if content != self.wanted[number]:
                    return f"request {number} reads {content}"
            shared = [r for r in state.requests if r.block == request.block >= 0]
            if request.phase == "computing" and len(shared) > 1:
                return f"block {request.block} is computed and held by another request"
        return None

    def is_over(self, state):
        """All requests have ended, and nothing is held for anyone."""
        return (
            all(request.phase == "done" for request in state.requests)
            and all(transfer.state == "ended" for transfer in state.transfers)
            and not state.writing
        )


def _request(state, number, request):
    requests = list(state.requests)
    requests[number] = request
    return state._replace(requests=tuple(requests))


def _block(state, place, block):
    blocks = list(state.blocks)
    blocks[place] = block
    return state._replace(blocks=tuple(blocks))


def _transfer(state, number, how):
    transfers = list(state.transfers)
    transfers[number] = transfers[number]._replace(state=how)
    return state._replace(transfers=tuple(transfers))


def _sent(state, message):
    return state._replace(messages=tuple(sorted((*state.messages, message))))


def _plain(state):
    """The same without what no transition looks at any more: far fewer states."""
    awaited = {number for _, number in state.messages}
    transfers = [
        t if t.state != "ended" or number in awaited else _GONE
        for number, t in enumerate(state.transfers)
    ]
    while transfers and transfers[-1] is _GONE:
        transfers.pop()
    requests = [
        r if r.phase in ("waiting", "loading") else Request(r.phase, r.block)
        for r in state.requests
    ]
    used = {r.block for r in requests} | {t.target for t in transfers if t.state != "ended"}
    used |= {place for _, place in state.writing}
    blocks = [
        block if block.name is not None or place in used else _EMPTY
        for place, block in enumerate(state.blocks)
    ]
    return state._replace(
        blocks=tuple(blocks), requests=tuple(requests), transfers=tuple(transfers)
    )


def _spent(state, fault):
    return state._replace(faults=state.faults - {fault})


def explore(specification, faults=FAULTS):
    """Visit every state; `(how many, what is wrong or None, the steps that lead there)`.

    Args:
        specification: the transitions.
        faults: which may come.
    """
    start = specification.start()._replace(faults=frozenset(faults))
    came, calm = {start: None}, {}
    waiting = deque([start])
    while waiting:
        state = waiting.popleft()
        wrong = specification.broken(state)
        if wrong is not None:
            return len(came), wrong, _path(came, state)
        for name, is_fault, changed in specification.steps(state):
            after = _plain(changed)
            if not is_fault:
                calm.setdefault(after, []).append(state)
            if after not in came:
                came[after] = (state, name)
                waiting.append(after)
    ends = [state for state in came if specification.is_over(state)]
    good, waiting = set(ends), deque(ends)
    while waiting:
        for before in calm.get(waiting.popleft(), ()):
            if before not in good:
                good.add(before)
                waiting.append(before)
    for state in came:  # in the order of the search: the first one is as near as any
        if state not in good:
            return len(came), "from here requests never end, or something stays held", _path(came, state)
    return len(came), None, []


def _path(came, state):
    steps = []
    while came[state] is not None:
        state, name = came[state]
        steps.append(name)
    return steps[::-1]
