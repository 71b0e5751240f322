"""Streams that are broken, one bug each; `test_stream.py` says that the machine notices."""

import itertools
from dataclasses import replace

import msgspec

import kvcore
from kvcore import wire


class DeafFollower(wire.Follower):
    """Applies what comes and asks for nothing."""

    def live(self, sequence, batch):
        self._apply(sequence, batch)
        return False


class GaplessFollower(wire.Follower):
    """Drops what is known, and takes whatever else comes for the next."""

    def live(self, sequence, batch):
        if not self.asking and self.next is not None and sequence > self.next:
            self.next = sequence
        return super().live(sequence, batch)


class TrustingFollower(wire.Follower):
    """Asks for the next batch without looking at the last again: a new life passes for the old."""

    def ask(self, **options):
        super().ask(**options)
        return self.next or 0


class TimelessFollower(wire.Follower):
    """Takes every older number for a new life."""

    def live(self, sequence, batch):
        if not self.asking and self.next is not None and sequence < self.next:
            self.forget()
        return super().live(sequence, batch)


class HoardingFollower(wire.Follower):
    """Keeps what it knew when what followed is lost."""

    def _lose(self):
        self.next = None


class ImpatientFollower(wire.Follower):
    """Drops what comes while it waits for an answer, and thinks it has had it."""

    def live(self, sequence, batch):
        if self.asking:
            self.next, self._time = sequence + 1, batch.time
            return False
        return super().live(sequence, batch)


class GrudgingFollower(wire.Follower):
    """Asks again for what an answer should have had, though it was a life before's."""

    def replay_ended(self, *, answered=True):
        due = self._due
        again = super().replay_ended(answered=answered)
        late = {number: batch for number, batch in due.items() if number > (self.next or 0)}
        self._early = late | self._early
        return again or bool(late)


class CredulousFollower(wire.Follower):
    """Takes what had come before its request, though the answer has nothing of it."""

    def replay_ended(self, *, answered=True):
        return super().replay_ended(answered=answered and self._heard)


class ShortHistory(wire.History):
    """Has no snapshot: who comes late gets what is left."""

    def since(self, sequence):
        return [sent for sent in self._kept if sent.sequence >= sequence]


class StaleHistory(wire.History):
    """Keeps a snapshot though batches after it are gone."""

    def add(self, payload, *, anew=False):
        base = self._base
        sent = super().add(payload, anew=anew)
        self._base = self._base or base
        return sent


class EarlyHistory(wire.History):
    """Numbers a snapshot with the batch that is still to come."""

    def rebase(self, payload):
        self._base = wire.Sent(self.last + 1, payload)


class TalkativeEncoder(wire.Encoder):
    """Tells of salted content."""

    def __init__(self, groups, **options):
        super().__init__(groups, **{**options, "publish_salted": True})


class BlindEncoder(wire.Encoder):
    """Begins every chain in the namespace of its adapter alone."""

    def _stored(self, run):
        return [replaced(event, extra_keys=None) for event in super()._stored(run)]


class SilentEncoder(wire.Encoder):
    """Forgets removals once it has left something out."""

    def _removed(self, event):
        return [] if self._left_out else super()._removed(event)


class OpenEncoder(wire.Encoder):
    """A snapshot that does not clear what was before."""

    def snapshot(self, snapshot):
        events = [*snapshot.stored] or [kvcore.AllCleared(snapshot.number)]
        return self.batch(events) or super().snapshot(replace(snapshot, stored=()))


class HashIndex(wire.Index):
    """Takes a block hash for its content, from any publisher."""

    def _named(self, known, name):
        node = super()._named(known, name)
        if node is not None:
            node.holders |= known.mask
        return node


class OneSpaceIndex(wire.Index):
    """Knows one namespace."""

    def _root(self, size, namespace):
        return super()._root(size, kvcore.encode_namespace(kvcore.Namespace()))


class KeepingIndex(wire.Index):
    """Clears nothing."""

    def _clear(self, known):
        pass


class LoyalIndex(wire.Index):
    """Waits for a group that a publisher had before it started again."""

    def _clear(self, known):
        bits, mask = known.bits, known.mask
        super()._clear(known)
        if self._publishers.get(who := self._said) is known:
            known.bits, known.mask = bits, mask
            self._owners |= dict.fromkeys(bits.values(), who)
            del self._free_bits[len(self._free_bits) - len(bits) :]

    def apply(self, publisher, batch):
        self._said = publisher
        super().apply(publisher, batch)


class GreedyIndex(wire.Index):
    """Takes a content from all when one has lost it."""

    def _take(self, node, mask):
        super()._take(node, node.holders)


class UnionIndex(wire.Index):
    """Lets the group that holds most speak for its publisher."""

    def match(self, tokens, **options):
        for known in self._publishers.values():
            for group in [*known.bits][1:]:
                del known.bits[group]
        return super().match(tokens, **options)


class BlindIndex(wire.Index):
    """Passes windows over."""

    def _store(self, publisher, known, event, window):
        if not window:
            super()._store(publisher, known, event, window)


class ShortSightedIndex(wire.Index):
    """Takes a window for a token shorter than it is."""

    def _store(self, publisher, known, event, window):
        super()._store(publisher, known, event, window - 1 if window > 1 else window)


class HereditaryIndex(wire.Index):
    """Takes from a window what follows a block that is gone."""

    def _remove(self, known, bit, event):
        windows, self._windows = self._windows, 0
        super()._remove(known, bit, event)
        self._windows = windows


class HastyIndex(wire.Index):
    """Forgets a block without a holder although others follow it."""

    def _take(self, node, mask):
        super()._take(node, mask)
        if not node.holders and node.parent is not None and node.parent.child(node.content) is node:
            node.parent.drop(node)


class ClingingIndex(wire.Index):
    """Lets what is out of the tree keep what it followed."""

    def _take(self, node, mask):
        path = [node]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        super()._take(node, mask)
        for below, above in itertools.pairwise(path):
            below.parent = above


class HindsightIndex(wire.Index):
    """Takes two blocks of equal tokens for one, whatever follows them."""

    def _store(self, publisher, known, event, window):
        super()._store(publisher, known, replaced(event, lookahead_token_ids=None), window)


class MyopicIndex(wire.Index):
    """Reads one token ahead where a hash covers two."""

    def _store(self, publisher, known, event, window):
        after = event.lookahead_token_ids
        after = after and [each[:1] for each in after]
        super()._store(publisher, known, replaced(event, lookahead_token_ids=after), window)


class HurriedIndex(wire.Index):
    """Says of the last block of a prompt that it is held, though what follows is not known."""

    def match(self, tokens, **options):
        found = {}
        for next_token in range(3):
            for who, length in super().match([*tokens, next_token], **options).items():
                found[who] = max(found.get(who, 0), length)
        return {who: min(length, len(tokens)) for who, length in found.items()}


class FarSightedIndex(wire.Index):
    """Counts what is far."""

    def _apply(self, publisher, known, event):
        near = event if isinstance(event, wire.Cleared) else replaced(event, locality=None)
        super()._apply(publisher, known, near)


class DeafToFarIndex(wire.Index):
    """Passes over what is stored far, and not what goes there."""

    def _apply(self, publisher, known, event):
        if isinstance(event, wire.Removed):
            event = replaced(event, locality=None)
        super()._apply(publisher, known, event)


class CommunalIndex(wire.Index):
    """Takes the tiers of one medium for one."""

    def _apply(self, publisher, known, event):
        one = event if isinstance(event, wire.Cleared) else replaced(event, ownership=None)
        super()._apply(publisher, known, one)


class TimidFollower(wire.Follower):
    """Asks for everything, whatever it knows."""

    def ask(self, **options):
        super().ask(**options)
        return 0


class HopefulFollower(wire.Follower):
    """Takes the next number for the life that it knows, though its connection was made anew."""

    def ask(self, *, is_reconnected=False):
        return super().ask()


def replaced(event, **changes):
    return msgspec.structs.replace(event, **changes)


SABOTAGES = {
    "make_follower": (
        DeafFollower, GaplessFollower, TrustingFollower, TimelessFollower, HoardingFollower,
        ImpatientFollower, GrudgingFollower, CredulousFollower, TimidFollower,
        HopefulFollower,
    ),
    "make_history": (ShortHistory, StaleHistory, EarlyHistory),
    "make_encoder": (TalkativeEncoder, BlindEncoder, SilentEncoder, OpenEncoder),
    "make_index": (
        HashIndex, OneSpaceIndex, KeepingIndex, LoyalIndex, GreedyIndex, UnionIndex, BlindIndex,
        ShortSightedIndex, HereditaryIndex, HastyIndex,
    ),
}  # fmt: skip
LOOKAHEAD_SABOTAGES = (HindsightIndex, MyopicIndex, HurriedIndex)
TIER_SABOTAGES = (FarSightedIndex, DeafToFarIndex, CommunalIndex)
