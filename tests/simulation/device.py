"""A device that only remembers, and a model whose every token depends on all that it read.

The digest of a token depends on the namespace of its text and on all tokens before it; the next
token follows from it, half of the time as the next in a circle, so that texts repeat themselves and
draft tokens are accepted. The memory keeps for every slot the digest that was computed into it, in
each layer group another one.
Before a chunk is computed, every block that its first token sees is compared with the digests of
its own text: a stale, foreign or missing read is a violation at once.
"""

from zlib import crc32

import kvcore
from model.control.step import Flight
from model.load.text import TextStream
from tests.model.control.simulation import SlotMemory

VOCABULARY = 32
EOS = 0
_CIRCLE = 9  # the tokens of prompts
_MASK = (1 << 64) - 1


class ViolationError(BaseException):  # no `except Exception` of the product hides it
    """The run has broken a rule."""


class DeviceError(RuntimeError):
    """A fault of the device, injected."""


def seed_of(namespace):
    """The digest before the first token of a text."""
    return crc32(repr(namespace).encode())


def digest(before, token):
    """The digest of a token behind another one; its low bits are the token."""
    found = ((before ^ (token + 1)) * 0x9E3779B97F4A7C15) & _MASK
    return (found ^ (found >> 29)) & -VOCABULARY | token


def digests_of(tokens, namespace):
    """The digest of each token of a text."""
    found, digests = seed_of(namespace), []
    for token in tokens:
        found = digest(found, token)
        digests.append(found)
    return digests


def in_group(number, found):
    """What a layer group keeps of a token with this digest."""
    return found | number << 64


def contents_of(number, group, digests):
    """What the blocks of a full block of a layer group hold, from the digests of its tokens."""
    if isinstance(group, kvcore.RecurrentState):
        return [(piece, digests[-1]) for piece in range(group.num_blocks)]
    return [[in_group(number, found) for found in digests]]


def next_token(found):
    """What the model draws behind a token with this digest; one in 64 is the end."""
    if found >> 40 & 1:
        return found % VOCABULARY % _CIRCLE + 1
    return (found >> 20) % VOCABULARY


def answer(prompt, params, namespace):
    """The tokens that a request gives when it has the machine to itself."""
    found = seed_of(namespace)
    for token in prompt:
        found = digest(found, token)
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    tokens = []
    while len(tokens) < params.max_tokens and not (tokens and tokens[-1] in ends):
        tokens.append(next_token(found))
        found = digest(found, tokens[-1])
    return tokens


class Texts:
    """The tokenizer and texts of the model: a letter for each token, nothing for the last."""

    eos_token_ids = frozenset({EOS})
    chat_template = None
    model_type = ""

    def __init__(self):
        self.codec = self

    def encode(self, text, *, adds_special_tokens=True):
        return [1 + ord(letter) % (VOCABULARY - 1) for letter in text]

    def encode_chat(self, messages, *, opens_answer=True, options=None):
        del options
        return self.encode("".join(m["role"] + m["content"] for m in messages) + "a" * opens_answer)

    def begun_answer(self, messages, *, opens_answer=True, options=None):
        return ""

    def decode(self, tokens):
        return "".join([chr(96 + token) for token in tokens if token != EOS])

    def describe(self):
        return None

    def open_step(self):
        return self.decode

    def open_text(self, params):
        return TextStream(self.decode, params.stop, self.open_step())


class NoGrammars:
    """Stands where an engine keeps its grammars: none is ever used."""

    texts = ()

    def take_overrun(self):
        """Requests that have used up their time."""
        return []


class _Drawn:
    """The tokens of a step, which are there when the device is done, or its error.

    Args:
        fail: is called where the device has failed meanwhile; None: it has not.
    """

    def __init__(self, host, done_s, tokens, fail):
        self._host, self._done_s, self._tokens, self._fail = host, done_s, tokens, fail

    def read(self):
        wait_s = self._done_s - self._host.loop.now
        if wait_s > 0:
            self._host.loop.sleep(wait_s)
        if self._fail is not None:
            self._fail()
        return self._tokens

    def logprobs(self):
        return {}


class Device(SlotMemory):
    """Runs steps for an `EngineCore`, one after another in simulated time.

    Args:
        host: of the process.
        kv: whose blocks these are.
        faults: decides what goes wrong: `step_fails()`, `read_fails()`, `logits_fail()`.
        most_deferred: of how many requests at most the tokens are read after the next step is sent;
            0: of none.
    """

    def __init__(self, host, kv, faults, most_deferred):
        super().__init__(kv)
        self.is_async = most_deferred > 0
        self._most_deferred = most_deferred
        self.num_computed = 0
        self._host, self._kv, self._faults = host, kv, faults
        self._texts = {}  # request_id -> digests of its tokens, those on the device included
        self._drawn = {}  # request_id -> its newest token
        self._written = []  # slots, by the steps that were not read when the last one was sent
        self.num_sent = 0  # steps
        self.tiers = None  # has copies of blocks: it hears of slots that turn out to be spoilt
        self._done_s = 0.0

    def mend(self):
        """Fail no more."""
        self._faults.end()

    def can_defer_read(self, sampling):
        return self.is_async and len(sampling) <= self._most_deferred

    def discard(self, request):
        self._texts.pop(request.request_id, None)
        self._drawn.pop(request.request_id, None)

    def send(self, step, sampling, before, watch):
        del watch
        self.transfer(step)
        self._written = [] if before is None else self._written[-1:]
        if self._faults.step_fails():
            self._spoil(step)
            self._fail()
        self.num_sent += 1
        self._written.append([])
        rows, ahead, num_tokens = {}, [], 0
        for chunk in step.chunks:
            num_tokens += chunk.num_tokens
            digests = self._compute(chunk)
            if chunk.samples:
                tokens = [*map(next_token, digests[chunk.start + chunk.num_known - 1 :])]
                numbers = [request.request_id for request in chunk.sampling]
                self._drawn.update(dict.fromkeys(numbers, tokens[0]))
                tokens = [None if self._faults.logits_fail() else token for token in tokens]
                rows.update(dict.fromkeys(numbers, tokens[0]))
                ahead += tokens[1:]
        self._done_s = max(self._done_s, self._host.loop.now) + 0.0002 + num_tokens * 0.00001
        drafted = tuple([(chunk.request, chunk.drafts) for chunk in step.chunks if chunk.drafts])
        tokens = [rows[request.request_id] for request in sampling] + ahead
        fail = self._fail if self._faults.read_fails() else None
        return Flight(sampling, _Drawn(self._host, self._done_s, tokens, fail), drafted)

    def _compute(self, chunk):
        """Read and write what a chunk does; the digests of its text, drafts included."""
        request = chunk.request
        found = self._digests(request)
        for token in chunk.drafts:
            found.append(digest(found[-1], token))
        start, stop, size = chunk.start, chunk.start + chunk.num_tokens, self.size
        if len(found) < stop:
            raise ViolationError(f"{request!r}: a chunk to {stop} of {len(found)} tokens")
        self.num_computed += chunk.num_tokens
        sequence, slots, written = request.running_sequence, self.slots, self._written[-1]
        groups = zip(self._kv.groups, sequence.tables, strict=False)
        for number, (group, table) in enumerate(groups):
            ids = table.block_ids
            kept = [in_group(number, one) for one in found] if number else found
            self._read(request, ids, group.first_visible(start), start, kept)
            for place in range(start, stop):
                slot = ids[place // size] * size + place % size
                slots[slot] = kept[place]
                written.append(slot)
        if sequence.state is not None:
            self._advance(request, start, found[: start + chunk.num_known])
        return found

    def _digests(self, request):
        """The digests of all its tokens, one that only the device knows included."""
        digests, tokens = self._texts.get(request.request_id), request.tokens
        if digests is None:
            digests = self._texts[request.request_id] = [seed_of(request.namespace)]
        for token in tokens[len(digests) - 1 :]:
            digests.append(digest(digests[-1], token))
        if request.is_expecting and len(digests) == len(tokens) + 1:
            digests.append(digest(digests[-1], self._drawn[request.request_id]))
        return digests[1:]

    def _read(self, request, ids, first_visible, start, found):
        """Compare what the first token of a chunk sees with its own text."""
        slots, size = self.slots, self.size
        first, full = first_visible // size, start // size
        held = [slots[block_id * size + size - 1] for block_id in ids[first:full]]
        wanted = found[(first + 1) * size - 1 : full * size : size]
        if start % size and first_visible < start:
            held.append(slots[ids[full] * size + start % size - 1])
            wanted.append(found[start - 1])
        if held != wanted:
            raise ViolationError(
                f"{request!r}: its token {start} reads what is not its own: blocks "
                f"{list(ids[first : full + 1])}"
            )

    def _advance(self, request, start, found):
        """Read the state of a sequence and write the next one."""
        read, written = request.running_sequence.state_blocks
        held = [self.slots[block_id * self.size] for block_id in read]
        wanted = [(piece, found[start - 1]) for piece in range(len(written) if start else 0)]
        if held != wanted:
            raise ViolationError(f"{request!r}: its token {start} reads a state not its own")
        for piece, block_id in enumerate(written):
            self.slots[block_id * self.size] = (piece, found[-1])
            self._written[-1].append(block_id * self.size)

    def _spoil(self, step):
        """Nothing is known of what a step that fails when it is sent writes."""
        for chunk in step.chunks:
            for table in chunk.request.running_sequence.tables:
                for block_id in table.block_ids[chunk.start // self.size :]:
                    self.set_block(block_id, ["spoilt"] * self.size)

    def _fail(self):
        """Fail: nor of what was written by a step that was not read."""
        for age, slots in enumerate(reversed(self._written)):
            for slot in slots:
                self.slots[slot] = "spoilt"
                if self.tiers is not None:
                    self.tiers.spoil(slot, self.num_sent - age)
        raise DeviceError("the device failed")


def make_kv(features, kind=kvcore.KVCacheManager):
    """The allocator of a run."""
    return kind(
        features.num_blocks,
        features.block_size,
        groups=features.groups(),
        enable_caching=features.caches,
        record_events="sha256" if features.tiers else "xxh3-128",
    )
