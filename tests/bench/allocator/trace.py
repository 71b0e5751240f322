"""A trace: conversations with system prompts and several turns, as a fixed schedule.

The schedule is computed before anything is measured and depends on no allocator. A conversation's
next turn becomes ready some steps after the previous one has ended; its prompt is the previous
prompt, the answer and a new message. Lengths and pauses are seeded. `ChatShape()` gives 5,000
requests with a mean prompt of 2,219 tokens and a mean answer of 138, `AGENTS` 3,000 of 7,500.
"""

import heapq
import random
from array import array
from dataclasses import dataclass
from typing import NamedTuple

from tests.bench.allocator.prompts import random_tokens


@dataclass(frozen=True, slots=True)
class ChatShape:
    """What a trace is made of: counts, and means of distributions in tokens or steps."""

    num_requests: int = 5000
    num_open: int = 325  # conversations at a time
    max_running: int = 64
    num_systems: int = 16  # system prompts, some far more popular than others
    mean_system: int = 590
    mean_message: int = 362
    mean_answer: int = 138
    mean_turns: int = 5
    mean_pause: int = 600  # steps between a turn's end and the next turn


AGENTS = ChatShape(  # long instructions, many turns, what a tool says for a user, no long pause
    num_requests=3000, num_open=96, num_systems=4, mean_system=3000, mean_message=600,
    mean_answer=120, mean_turns=16, mean_pause=30,
)  # fmt: skip


class Turn(NamedTuple):
    """One request; an earlier one had its first `num_shareable` tokens too: none can hit more."""

    conversation: int
    prompt: array
    answer: array
    num_shareable: int


class Step(NamedTuple):
    """The turns that begin, a token for each that runs, and the places of those that end.

    Those that begin join the end of the running list; the places are given highest first.
    """

    started: list[int]
    tokens: list[int]
    finished: list[int]


class Trace(NamedTuple):
    """A schedule. `steps` refer to `turns` by index."""

    turns: list[Turn]
    steps: list[Step]

    @property
    def num_prompt_tokens(self):
        return sum([len(turn.prompt) for turn in self.turns])

    @property
    def num_shareable_tokens(self):
        """What an endless cache of single tokens would hit."""
        return sum([min(turn.num_shareable, len(turn.prompt) - 1) for turn in self.turns])


class _Chats:
    """Makes conversations and their turns, in the order of the schedule."""

    def __init__(self, shape, rng):
        self.shape, self.rng = shape, rng
        self.used_systems = set()
        self.chats, self.turns = [], []  # a chat: history, turns that are left, shareable tokens
        self.systems = [
            random_tokens(rng, self.length(shape.mean_system, 4096))
            for _ in range(shape.num_systems)
        ]

    def length(self, mean, maximum):
        """A length with a long tail, its mean near `mean`."""
        return min(maximum, max(1, round(self.rng.gammavariate(1.5, mean / 1.5))))

    def pause(self):
        return 1 + int(self.rng.expovariate(1 / self.shape.mean_pause))

    def begin(self):
        """Make a conversation; return its number."""
        system = min(int(self.rng.expovariate(4 / self.shape.num_systems)), len(self.systems) - 1)
        num_turns = 1 + min(int(self.rng.expovariate(1 / (self.shape.mean_turns - 1))), 15)
        shareable = len(self.systems[system]) if system in self.used_systems else 0
        self.used_systems.add(system)
        self.chats.append([self.systems[system][:], num_turns, shareable])
        return len(self.chats) - 1

    def next_turn(self, number):
        """Make a conversation's next turn; return its index."""
        history, left, shareable = self.chats[number]
        prompt = history + random_tokens(self.rng, self.length(self.shape.mean_message, 4096))
        answer = random_tokens(self.rng, self.length(self.shape.mean_answer, 1024))
        self.turns.append(Turn(number, prompt, answer, shareable))
        self.chats[number] = [prompt + answer, left - 1, len(prompt) + len(answer)]
        return len(self.turns) - 1


def chat_trace(seed, shape):
    """The trace of a seed and a shape: always the same. O(tokens)."""
    chats = _Chats(shape, random.Random(seed))
    ready = [(chats.pause(), chats.begin()) for _ in range(shape.num_open)]
    heapq.heapify(ready)
    running, steps, now = [], [], 0  # running: (turn, tokens given)
    while running or len(chats.turns) < shape.num_requests:
        started = []
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
        finished = []
        for place in range(len(running) - 1, -1, -1):
            turn, given = running[place]
            if given == len(chats.turns[turn].answer):
                finished.append(place)
                del running[place]
                number = chats.turns[turn].conversation
                goes_on = chats.chats[number][1] > 0
                heapq.heappush(ready, (now + chats.pause(), number if goes_on else chats.begin()))
        steps.append(Step(started, tokens, finished))
    return Trace(chats.turns, steps)
