"""What one run does: drawn from a seed before it starts, so that it can be cut down afterwards.

Swarm testing (Groce et al. 2012): each seed turns features and faults on or off, so that runs
differ in kind, and what needs the absence of something is found too.
"""

import dataclasses
from dataclasses import dataclass
from random import Random

import kvcore


@dataclass(frozen=True)
class Features:
    """How a replica is made."""

    num_blocks: int
    block_size: int
    kinds: tuple[str, ...]  # of layer groups
    caches: bool
    most_deferred: int  # sampled tokens that are read after the next step is sent; 0: none
    drafts: bool
    num_host_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    watermark: float
    priority_span: int
    speaks_http: bool
    num_ranks: int = 1
    num_replicas: int = 1
    policy: str = "prefix"
    wakes: bool = True
    replay_bytes: int = 1 << 20
    network_faults: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ()

    def reads_some_at_once(self):
        """Whether narrow steps are read late and wide ones at once: a failure differs there."""
        is_mixed = 0 < self.most_deferred < self.max_num_seqs and not self.drafts
        return is_mixed and self.num_ranks == 1 and self.caches

    def stores_what_is_not_read(self):
        """Whether tiers may copy what a step has written before its tokens are read."""
        is_late = self.most_deferred > 0 and not self.drafts
        return is_late and self.num_ranks == 1 and bool(self.tiers)

    def groups(self):
        """The layer groups of its allocator."""
        made = {
            "full": kvcore.FullAttention(),
            "window": kvcore.SlidingWindow(2 * self.block_size + 1),
            "short window": kvcore.SlidingWindow(2),
            "chunks": kvcore.ChunkedLocal(2 * self.block_size),
            "states": kvcore.RecurrentState(num_blocks=2),
        }
        return [made[kind] for kind in self.kinds]


@dataclass(frozen=True)
class Ask:
    """A client: what it asks for, when, and how it behaves.

    Attributes:
        number: its name in stories.
        at_s: when it comes.
        prompt: its tokens.
        leaves_s: after how long it goes away; None: it stays.
        pause_s: how long it takes for each piece of its answer.
    """

    number: int
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    num_samples: int = 1
    priority: int = 0
    client: str | None = None  # whose request it is: clients take turns
    salt: str = ""
    stop: tuple[str, ...] = ()
    ignores_eos: bool = False
    retains: bool = False
    streams: bool = True
    leaves_s: float | None = None
    pause_s: float = 0.0


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        kind: "step": a step of the device fails when it is sent; "read": when its tokens are read;
            "logits": some are no numbers; "drain": the server is asked to end; those of several
            replicas are in `fleet.py`.
        at: the number of the step, or the time in seconds.
    """

    kind: str
    at: float


@dataclass(frozen=True)
class Plan:
    """One run: `seed` decides what is not said here, which is who goes first."""

    seed: int
    features: Features
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)


FLEET_FAULTS = ("kill", "restart", "leave", "resubscribe", "clock")

_KINDS = (
    ("full",),
    ("full",),
    ("window",),
    ("full", "window"),
    ("full", "chunks"),
    ("full", "short window", "window"),
    ("full", "states"),
    ("full", "window", "states"),
)


def draw_plan(seed, *, faulty=True):
    """The plan of a seed.

    Args:
        seed: any number.
        faulty: whether anything goes wrong; clients may leave all the same.
    """
    draw = Random(seed)
    features = _with_tiers(_draw_features(draw), again := Random(seed + 5))
    swarm = {
        name: draw.random() < chance
        for name, chance in [
            ("samples", 0.4), ("priorities", 0.4), ("salts", 0.4), ("stops", 0.4),
            ("retains", 0.3), ("leaves", 0.6), ("slow", 0.4), ("shares", 0.8), ("bursts", 0.5),
            ("long", 0.3),
        ]
    }  # fmt: skip
    asks, at_s, rate = [], 0.0, draw.choice((300, 3000))
    stems = [tuple(_tokens(draw, draw.randint(1, 40))) for _ in range(3)]
    for number in range(draw.choice((3, 8, 20, 40))):
        at_s += 0.0 if swarm["bursts"] and draw.random() < 0.7 else draw.expovariate(rate)
        prompt = list(draw.choice(stems)) if swarm["shares"] and draw.random() < 0.7 else []
        prompt = prompt[: draw.randint(0, len(prompt))] if draw.random() < 0.3 else prompt
        prompt += _tokens(draw, draw.randint(1, 60 if swarm["long"] else 12))
        asks.append(
            Ask(
                number=number,
                at_s=at_s,
                prompt=tuple(prompt),
                max_tokens=draw.choice((1, 2, 5, 17, 60 if swarm["long"] else 30)),
                num_samples=draw.choice((1, 1, 2, 3)) if swarm["samples"] else 1,
                priority=draw.randint(-1, 1) if swarm["priorities"] else 0,
                salt=draw.choice(("", "one", "two")) if swarm["salts"] else "",
                stop=("aa", "b") if swarm["stops"] and draw.random() < 0.5 else (),
                ignores_eos=draw.random() < 0.5,
                retains=swarm["retains"] and draw.random() < 0.3,
                streams=draw.random() < 0.7,
                leaves_s=_draw_leaving(draw) if swarm["leaves"] and draw.random() < 0.3 else None,
                pause_s=draw.expovariate(500) if swarm["slow"] and draw.random() < 0.3 else 0.0,
            )
        )
    if features.tiers:
        asks = _asked_again(asks, again)
    names = again.choice(((None,), (None,), ("one", "two"), (None, "one", "two", "three")))
    asks = [dataclasses.replace(ask, client=again.choice(names)) for ask in asks]
    faults = _draw_faults(draw, at_s, features) if faulty else ()
    if faulty and features.reads_some_at_once() and again.random() < 0.5:
        faults += tuple([Fault("read", again.randint(2, 40)) for _ in range(2)])
    if faulty and features.stores_what_is_not_read() and again.random() < 0.7:
        faults += tuple([Fault("read", again.randint(2, 80)) for _ in range(6)])
    return Plan(seed, features, tuple(asks), faults)


def _draw_leaving(draw):
    """After how long a client leaves: some while their request is on its way to the engine."""
    return draw.choice((0.0, draw.expovariate(20000), draw.expovariate(100)))


def _draw_features(draw):
    kinds, num_replicas = draw.choice(_KINDS), draw.choice((1, 1, 1, 2, 3))
    if num_replicas > 1 and draw.random() < 0.6:
        kinds = ("full",)
    block_size = draw.choice((1, 2, 4, 4, 8, 16))
    needed = 2 + len(kinds) * (2 + 120 // block_size) + 6
    return Features(
        num_blocks=needed + draw.choice((0, 0, 5, 40, 400)),
        block_size=block_size,
        kinds=kinds,
        caches=draw.random() < 0.85,
        most_deferred=draw.choice((0, 0, 0, 1, 3, 64)),
        drafts=draw.random() < 0.4,
        num_host_blocks=draw.choice((0, 0, 30, 300)),
        max_num_seqs=draw.choice((1, 2, 4, 16, 64)),
        max_num_batched_tokens=draw.choice((1, 3, 7, 32, 256)),
        max_waiting=draw.choice((4, 1000)),
        watermark=draw.choice((0.0, 0.01, 0.2)),
        priority_span=draw.choice((1, 4, 64)),
        speaks_http=draw.random() < 0.3,
        num_ranks=draw.choice((1, 1, 1, 1, 2, 3)) if num_replicas == 1 else 1,
        num_replicas=num_replicas,
        policy=draw.choice(("prefix", "prefix", "prefix", "round-robin", "power-of-two")),
        wakes=draw.random() < 0.5,
        replay_bytes=draw.choice((0, 2000, 1 << 20)),
        network_faults=tuple(f for f in ("lose", "late", "repeat", "mute") if draw.random() < 0.4),
    )


def _with_tiers(features, draw):
    """The same, perhaps with host memory or a disk behind the pool, which is small then."""
    names = draw.choice(((), (), ("host",), ("disk",), ("host", "disk")))
    if not (names and features.caches and features.num_replicas == 1):
        return features
    block_size = min(features.block_size, 4)
    small = 8 + len(features.kinds) * (2 + draw.choice((30, 50, 80)) // block_size)
    return dataclasses.replace(features, tiers=names, num_blocks=small, block_size=block_size)


def _asked_again(asks, draw):
    """The same requests, many with the prompt of an earlier one, or one that goes on from it."""
    for place, ask in enumerate(asks):
        if place and draw.random() < 0.7:
            earlier = asks[draw.randrange(place)]
            prompt = earlier.prompt + tuple(_tokens(draw, draw.choice((0, 1, 6))))
            salt = ask.salt if draw.random() < 0.3 else earlier.salt
            asks[place] = dataclasses.replace(ask, prompt=prompt, salt=salt)
    return asks


def _draw_faults(draw, until_s, features):
    faults = []
    if draw.random() < 0.35 and features.num_ranks == 1:  # else a rank is lost, and all end
        for _ in range(draw.randint(1, 3)):
            faults.append(Fault(draw.choice(("step", "read")), draw.randint(0, 60)))
            if draw.random() < 0.2:  # the engine does not compute any more
                faults.append(Fault("step", faults[-1].at + 1))
    if draw.random() < 0.25:
        faults += [Fault("logits", draw.randint(0, 100)) for _ in range(draw.randint(1, 3))]
    if features.num_replicas > 1:
        for kind in FLEET_FAULTS:
            if draw.random() < 0.3:
                faults.append(Fault(kind, draw.random() * (until_s + 0.05)))
    elif draw.random() < 0.25:
        faults.append(Fault("drain", draw.random() * (until_s + 0.05)))
    return tuple(faults)


def _tokens(draw, count):
    return [draw.randint(1, 9) for _ in range(count)]
