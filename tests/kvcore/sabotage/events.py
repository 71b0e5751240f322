"""Events, broken."""

from dataclasses import replace

import kvcore
from tests.kvcore.sabotage.registry import changed, in_manager


class SilentLog(kvcore.EventLog):
    def removed(self, nodes, group):
        pass


class RootlessLog(kvcore.EventLog):
    """Names every chain from one constant."""

    def _name(self, node, group):
        if node.parent is None:
            node.block_hash = kvcore.digest(b"", "xxh3-128")
        else:
            self._name(node.parent, group)
        return super()._name(node, group)


class AdapterBlindLog(kvcore.EventLog):
    """A second key function, which knows tokens and salt."""

    def _name(self, node, group):
        if node.parent is None:
            salt = kvcore.decode_namespace(node.tokens).salt
            key = kvcore.encode_namespace(kvcore.Namespace(salt=salt))
            node.block_hash = kvcore.digest(key, "xxh3-128")
        else:
            self._name(node.parent, group)
        return super()._name(node, group)


class BatchingLog(kvcore.EventLog):
    """Tells what was stored before what was removed."""

    def take(self):
        return tuple(sorted(super().take(), key=lambda e: not isinstance(e, kvcore.BlocksStored)))


class FirstNameLog(kvcore.EventLog):
    """Names of a run that goes only the first."""

    def removed(self, nodes, group):
        super().removed(nodes[:1], group)


class ForgetfulLog(kvcore.EventLog):
    """Says the namespace where a chain begins, and leaves it to the reader to remember."""

    def _describe(self, nodes, namespace_key, group, number):
        event = super()._describe(nodes, namespace_key, group, number)
        return event if event.parent is None else replace(event, namespace_key=b"")


class LossyLog(kvcore.EventLog):
    """Gives up what waits and says nothing."""

    def trim(self):
        super().trim()
        self._lost = 0


class HastyLog(kvcore.EventLog):
    """Gives up what waits, however little that is."""

    def trim(self):
        self.max_hashes = 0
        super().trim()


def with_log(log_class):
    def change(manager):
        if manager.events is not None:
            manager.events = log_class([g.block_size for g in manager.groups], "xxh3-128")
            manager.pool._log = manager.events
            for tree in manager.pool.trees:
                tree._log = manager.events

    return change


changed("events_forget_removals", with_log(SilentLog), "P21")
changed("events_ignore_the_namespace", with_log(RootlessLog), "P21", rows=(32,))
changed("events_know_of_tokens_and_salt_alone", with_log(AdapterBlindLog), "P21", rows=(38,))
changed("events_tell_stores_before_removals", with_log(BatchingLog), "P21", rows=(88,))
changed("events_tell_of_the_first_of_a_run_that_goes", with_log(FirstNameLog), "P21")
changed("events_leave_the_namespace_to_be_remembered", with_log(ForgetfulLog), "P21")
changed("events_are_lost_without_a_word", with_log(LossyLog), "P21")
changed("events_are_lost_when_there_is_room", with_log(HastyLog), "P21")


@in_manager("P21", rows=(85,))
class events_remove_with_the_first_copy(kvcore.BlockPool):
    def hand_out(self, blocks):
        for block in blocks:
            if self._log is not None and block.node is not None and len(block.node.copies()) > 1:
                self._log.removed([block.node], block.group)
        super().hand_out(blocks)


@in_manager("P21", rows=(26,))
class events_store_every_copy(kvcore.BlockPool):
    def attach(self, blocks, namespace_key, above, contents, group, passing=b""):
        super().attach(blocks, namespace_key, above, contents, group, passing)
        for block in blocks:
            if self._log is not None and block.prev_copy is not None:
                self._log.stored([block.node], namespace_key, group)
