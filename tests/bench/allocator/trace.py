"""A chat trace: conversations with system prompts and several turns, as a fixed schedule.

The schedule is computed before anything is measured and depends on no allocator: which requests are
prefilled in a step, which token each running one is given, which end. A conversation's next turn
becomes ready some steps after the previous one has ended, never before, and its prompt is the
previous prompt, the answer and a new message. Lengths and pauses are seeded; what the parameters
aim at are 5,000 requests with a mean prompt of 2,219 tokens and a mean answer of 138, and for
`AGENTS` 3,000 with a mean prompt of 7,500 tokens.
"""

from __future__ import annotations

import heapq
import random
from array import array
from dataclasses import dataclass, field

from tests.bench.allocator.prompts import random_tokens


@dataclass(frozen=True, slots=True)
class ChatShape:
    """What a trace is made of. Means are of the distributions, in tokens or steps.

    Attributes:
        num_requests: turns in all.
        num_open: conversations that are going on at a time.
        max_running: requests that run at a time.
        num_systems: different system prompts; some are far more popular than others.
        mean_system: tokens of a system prompt.
        mean_message: tokens of a user's message.
        mean_answer: tokens of an answer.
        mean_turns: turns of a conversation.
        mean_pause: steps between the end of a turn and the next turn.
    """

    num_requests: int = 5000
    num_open: int = 325
    max_running: int = 64
    num_systems: int = 16
    mean_system: int = 590
    mean_message: int = 362
    mean_answer: int = 138
    mean_turns: int = 5
    mean_pause: int = 600


AGENTS = ChatShape(
    num_requests=3000,
    num_open=96,
    num_systems=4,
    mean_system=3000,
    mean_message=600,
    mean_answer=120,
    mean_turns=16,
    mean_pause=30,
)
"""Agents: long instructions, many turns, what a tool says in place of a user, and no long pause."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    Attributes:
        conversation: which one it belongs to.
        prompt: what it is prefilled with.
        answer: the tokens that it decodes.
        num_shareable: leading tokens that an earlier request had too; no cache can hit more.
    """

    conversation: int
    prompt: array[int]
    answer: array[int]
    num_shareable: int


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine: prefill, decode all that run, end some.

    Attributes:
        started: the turns that are prefilled; they join the end of the running list, in order.
        tokens: then one token for each running request, in the list's order.
        finished: then the places in the list of those that end, highest first.
    """

    started: list[int]
    tokens: list[int]
    finished: list[int]


@dataclass(frozen=True, slots=True)
class Trace:
    """A schedule. `steps` refer to `turns` by index."""

    turns: list[Turn]
    steps: list[Step]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum([len(turn.prompt) for turn in self.turns])

    @property
    def num_shareable_tokens(self) -> int:
        """What an endless cache of single tokens would hit."""
        return sum([min(turn.num_shareable, len(turn.prompt) - 1) for turn in self.turns])


@dataclass(slots=True)
class _Chat:
    number: int
    history: array[int]
    turns_left: int
    num_shareable: int


@dataclass(slots=True)
class _Chats:
    """Makes conversations and their turns, in the order of the schedule."""

    shape: ChatShape
    rng: random.Random
    systems: list[array[int]] = field(default_factory=list)
    used_systems: set[int] = field(default_factory=set)
    chats: list[_Chat] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def length(self, mean: int, maximum: int) -> int:
        """Draw a length with a long tail, its mean near `mean`."""
        return min(maximum, max(1, round(self.rng.gammavariate(1.5, mean / 1.5))))

    def pause(self) -> int:
        return 1 + int(self.rng.expovariate(1 / self.shape.mean_pause))

    def begin(self) -> int:
        """Make a conversation; return its number."""
        system = min(int(self.rng.expovariate(4 / self.shape.num_systems)), len(self.systems) - 1)
        num_turns = 1 + min(int(self.rng.expovariate(1 / (self.shape.mean_turns - 1))), 15)
        shareable = len(self.systems[system]) if system in self.used_systems else 0
        self.used_systems.add(system)
        history = self.systems[system][:]
        self.chats.append(_Chat(len(self.chats), history, num_turns, shareable))
        return len(self.chats) - 1

    def next_turn(self, number: int) -> int:
        """Make a conversation's next turn; return its index."""
        chat = self.chats[number]
        prompt = chat.history + random_tokens(self.rng, self.length(self.shape.mean_message, 4096))
        answer = random_tokens(self.rng, self.length(self.shape.mean_answer, 1024))
        self.turns.append(Turn(number, prompt, answer, chat.num_shareable))
        chat.history = prompt + answer
        chat.num_shareable = len(chat.history)
        chat.turns_left -= 1
        return len(self.turns) - 1


def chat_trace(seed: int, shape: ChatShape) -> Trace:
    """Return the trace of a seed and a shape: always the same. O(tokens)."""
    chats = _Chats(shape, random.Random(seed))
    for _ in range(shape.num_systems):
        chats.systems.append(random_tokens(chats.rng, chats.length(shape.mean_system, 4096)))
    ready = [(chats.pause(), chats.begin()) for _ in range(shape.num_open)]
    heapq.heapify(ready)
    running: list[tuple[int, int]] = []  # (turn, tokens given)
    steps: list[Step] = []
    now = 0
    while running or len(chats.turns) < shape.num_requests:
        started: list[int] = []
        while len(running) + len(started) < shape.max_running and ready and ready[0][0] <= now:
            if len(chats.turns) == shape.num_requests:
                break
            started.append(chats.next_turn(heapq.heappop(ready)[1]))
        running += [(turn, 0) for turn in started]
        now += 1
        if not running:
            now = max(now, ready[0][0])
            continue
        tokens = [chats.turns[turn].answer[given] for turn, given in running]
        running = [(turn, given + 1) for turn, given in running]
        finished: list[int] = []
        for place in range(len(running) - 1, -1, -1):
            turn, given = running[place]
            if given == len(chats.turns[turn].answer):
                finished.append(place)
                del running[place]
                number = chats.turns[turn].conversation
                goes_on = chats.chats[number].turns_left > 0
                heapq.heappush(ready, (now + chats.pause(), number if goes_on else chats.begin()))
        steps.append(Step(started, tokens, finished))
    return Trace(chats.turns, steps)
