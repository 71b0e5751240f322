"""Identity of items, and events, broken."""

from dataclasses import replace

import kvcore
from tests.kvcore import machines
from tests.kvcore.sabotage.registry import in_manager, sabotage


@sabotage(machines.ManagerMachine, "P7", "P10", "P24", "P21")
class items_are_ignored(kvcore.KVCacheManager):  # vLLM PR #17378, SGLang #2151
    def _new_sequence(self, packed, key, items):
        return super()._new_sequence(packed, key, ())


@sabotage(machines.ManagerMachine, "P7", "P10", "P24", "P21")
class items_are_known_by_content_alone(kvcore.KVCacheManager):  # vLLM PR #36708, #56655
    def _described(self, tokens, namespace, items):
        packed, key, checked = super()._described(tokens, namespace, items)
        return packed, key, tuple(replace(item, mask=None) for item in checked)


class SilentLog(kvcore.EventLog):
    def removed(self, node, group):
        pass


class NamespaceBlindLog(kvcore.EventLog):
    def _name(self, node, group):
        if node.parent is None:
            node.name = kvcore.digest(b"", "xxh3-128")
        else:
            self._name(node.parent, group)
        return super()._name(node, group)


def with_log(log_class):
    def make(num_blocks, block_size, **options):
        manager = kvcore.KVCacheManager(num_blocks, block_size, **options)
        if manager.events is not None:
            manager.events = log_class([g.block_size for g in manager.groups], "xxh3-128")
            manager.pool._log = manager.events
            for tree in manager.pool.trees:
                tree._log = manager.events
        return manager

    return make


for log, name in (
    (SilentLog, "events_forget_removals"),
    (NamespaceBlindLog, "events_ignore_the_namespace"),  # SGLang #24568, llm-d-kv-cache #47
):
    maker = with_log(log)
    maker.__name__ = name
    sabotage(machines.ManagerMachine, "P21")(maker)


@in_manager("P21")
class events_remove_with_the_first_copy(kvcore.BlockPool):  # vLLM R5
    def take(self, num_blocks):
        for block in list(self.free_blocks())[:num_blocks]:
            if self._log is not None and block.node is not None and len(block.node.copies()) > 1:
                self._log.removed(block.node, block.group)
        return super().take(num_blocks)
