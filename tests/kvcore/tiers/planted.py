"""Tiers with one bug each, every bug one that an engine has shipped, or might.

The threads beside them are those in which the bug was reported. Each is an edit of one function,
and the property that must be seen broken.
"""

from kvcore.tiers import (
    disk,
    host,
    host_blocks,
    jobs,
    peer,
    peer_server,
    record,
    record_reader,
    tier_manager,
)

PLANTED = {}  # by name: the properties, the story in which it shows, and the edit


def plant(name, prop, *edit):
    PLANTED[name] = prop, *edit


# A record is what it says or a miss.

# LMCache/LMCache#4492, #4463: after a restart 38 of 38 answers are corrupt.
plant("index_takes_the_first_of_two_records", "P37", "faulty_reads", record_reader.RecordReader,
      "read", "faults.append(fault_of(head, payload, wanted.header))",
      "faults.append(None)")  # fmt: skip
# vllm#54363, #57912: a flipped bit is served, because there is no checksum.
plant("payload_has_no_checksum", "P37", "faulty_reads", record, "fault_of",
      'return None if checksum_of(*payload) == wanted.checksum else "corrupted"',
      "return None")  # fmt: skip
# vllm#55904, #55191: files are used again under other weights or another layout.
plant("meaning_is_not_looked_at", "P37", "other_weights", disk.DiskTier, "_scan_segment",
      "if header.meaning != self._meaning:", "if False:")  # fmt: skip
plant("meaning_is_always_the_same", "P37", "other_weights", record, "meaning_of",
      "value = fields[name]", 'value = "x"')  # fmt: skip
# sglang#37160, ai-dynamo/dynamo#11571: salts are ignored below the GPU.
plant("salts_are_left_out_of_the_key", "P37 P38", "restarts", tier_manager._Run, "__init__",
      'seq.namespace_key or b""', 'b"KVN1"')  # fmt: skip
# vllm#52234: a stale block id returns the answer to the previous prompt.
plant("copies_are_found_by_block_id", "P37", "restarts", tier_manager.TierManager, "_part",
      "node_hash(first.node, size, _ALGORITHM)",
      'first.block_id.to_bytes(32, "little")')  # fmt: skip
plant("groups_share_their_keys", "P37 P38", "restarts", record, "key_of", "group | is_private",
      "0 | is_private")  # fmt: skip
# sglang#39830: a tier serves what was there before the weights changed.
plant("a_reset_leaves_the_files_as_they_are", "P37", "resets", disk.DiskTier, "_clear",
      "for number in [*self._segments]:", "for number in ():")  # fmt: skip
plant("a_reset_leaves_host_memory_as_it_is", "P37", "resets", host.HostTier, "clear",
      "self._remove_all()", "pass")  # fmt: skip
plant("tiers_do_not_hear_of_bad_transfers", "P37", "resets", tier_manager.TierManager, "cleared",
      "tier.clear()", "pass")  # fmt: skip
# raullenchai/Rapid-MLX#187: what a crash has left is not counted, so it is not seen either.
plant("misses_are_not_counted", "P37", "faulty_reads", disk.DiskTier,
      "_note_fault", "self.stats.faults[fault] += 1", "pass")  # fmt: skip

# A copy is there when it is there.

# sglang#27504, vllm#45704: a block is reused while it is copied.
plant("stores_hold_no_blocks", "P38", "late_stores", tier_manager.TierManager, "begin_store",
      'self.kv.leases.begin([*blocks], "store", "tiers", None)',
      'self.kv.leases.begin([], "store", "tiers", None)')  # fmt: skip
plant("stores_go_on_after_a_reset", "P38", "resets", disk.DiskTier, "put",
      "if epoch != self.epoch:", "if False:")  # fmt: skip
# vllm#32255: a load goes on into blocks that another request has.
plant("jobs_go_on_when_they_are_given_up", "P38", "waits", jobs._Job, "cancel",
      "self._is_cancelled = True", "pass")  # fmt: skip
plant("loads_count_when_they_are_sent", "P38", "faulty_reads", tier_manager.TierManager,
      "finish_load", "job.is_whole and", "not job.is_stale and")  # fmt: skip
# vllm#50754: a load of which a part is missing counts as whole.
plant("loads_may_lack_a_part", "P38", "faulty_reads", jobs.LoadJob, "run",
      "if len(read) > 1 and not self._go_on(read, sent):",
      "if len(read) > 1 and not self._go_on(read, sent) and not ("
      "[self._end(each) for each in sent], sent.clear()):")  # fmt: skip
plant("pieces_of_a_state_are_all_the_first", "P38", "restarts", host_blocks.HostBlocks, "views",
      "for host_id in copy.ids", "for host_id in copy.ids[:1] * len(copy.ids)")  # fmt: skip
# Memory that is overwritten by mistake is served.
plant("sums_of_host_memory_are_not_compared", "P38", "memory_is_overwritten", jobs._Job,
      "_end_move", "elif copy.sums != sums:", "elif False:")  # fmt: skip
plant("blocks_of_evicted_copies_are_lost", "P24 P39", "restarts", host_blocks.HostBlocks, "_end",
      "self._free += copy.ids", "pass")  # fmt: skip

# Bytes are bounded.

# vllm#52784: no code path ever deletes a file.
plant("segments_are_never_deleted", "P39", "restarts", disk.DiskTier, "_make_room",
      "if self.stats.used_bytes + size <= limit:", "if True:")  # fmt: skip
# vllm#54779: the capacity is forgotten at a restart.
plant("capacity_is_forgotten_at_a_restart", "P39", "fills_up", disk.DiskTier, "_scan",
      "if self.stats.used_bytes <= self.stats.capacity_bytes:", "if True:")  # fmt: skip
plant("a_restart_counts_nothing", "P39", "restarts", disk.DiskTier, "_scan",
      "sum([segment.size for segment in self._segments.values()])", "0")  # fmt: skip
# kvcache-ai/mooncake#3741: writes over the quota.
plant("half_a_write_is_not_counted", "P39", "half_writes", disk.DiskTier, "_write",
      "self._files.cut(number, segment.size)", "pass")  # fmt: skip
plant("host_memory_is_counted_without_its_keys", "P39", "restarts", host.HostTier, "_drop",
      "block_bytes + ENTRY_BYTES", "block_bytes + 2 * ENTRY_BYTES")  # fmt: skip

# A device that fails for a while costs the tier for a while.

plant("a_full_device_costs_the_capacity_for_good", "P24", "device_fails", disk._Pauses, "end",
      "if self._due_s == math.inf or", "if True or")  # fmt: skip
plant("a_device_that_comes_back_is_counted_as_empty", "P39", "device_fails", disk.DiskTier,
      "_try_again", "self._scan()", "self.stats.used_bytes = 0")  # fmt: skip
plant("what_a_reset_could_not_delete_comes_back", "P37", "device_fails", disk.DiskTier,
      "_try_again", "if self._is_outdated:", "if False:")  # fmt: skip

# Every wait ends.

# LMCache/LMCache#1034, #3770: pins that nothing takes back.
plant("stores_keep_their_blocks", "P41", "restarts", tier_manager.TierManager, "finish_store",
      "job.lease.end()", "pass")  # fmt: skip
plant("loads_that_fail_keep_their_blocks", "P41", "faulty_reads", tier_manager.TierManager,
      "finish_load", "job.lease.end()", "pass")  # fmt: skip

# What is written is found.

# eugr/spark-vllm-docker#373: 502 GB written, nothing ever read. vllm#47636: keys of one process.
plant("records_end_the_scan", "P24", "restarts", disk.DiskTier, "_scan_segment",
      "offset += RECORD_BYTES + header.length", "break")  # fmt: skip
plant("a_full_tier_keeps_nothing", "P24", "restarts", disk.DiskTier, "_make_room",
      "self._evict(size)", "return False")  # fmt: skip
plant("a_used_prefix_is_not_stored_again", "P24", "outlives_its_copies", tier_manager.TierManager,
      "_use", "self._published[block] = None", "pass")  # fmt: skip
plant("a_store_of_before_a_reset_is_waited_for", "P24", "stored_again_after_a_reset",
      tier_manager.TierManager, "cleared", "self._storing.clear()", "pass")  # fmt: skip

plant("a_failed_step_costs_all_copies", "P24", "steps_fail", tier_manager.TierManager, "cleared",
      "if self._wrong is None:", "if True:")  # fmt: skip
plant("a_failed_step_leaves_what_it_has_written", "P37", "steps_fail", tier_manager.TierManager,
      "cleared", "tier.forget(mark, keys)", "pass")  # fmt: skip

# A crash at any write.

# raullenchai/Rapid-MLX#187, jundot/omlx#2255, jjang-ai/vmlx#4: a crash poisons the next start.
plant("an_eviction_writes_a_header", "P24", "dies", disk.DiskTier, "_kill",
      "offset + DEAD_OFFSET, [DEAD]", "offset, [bytes(RECORD_BYTES)]")  # fmt: skip

# A name is of its content alone, and a wait is bounded.

# vllm#47636: keys that are seeded in every process.
plant("keys_are_of_one_process", "P37", "restarts", tier_manager.TierManager, "_part",
      "node_hash(first.node, size, _ALGORITHM)",
      "node_hash(first.node, size, _ALGORITHM)[:-8] + id(self.kv).to_bytes(8)")  # fmt: skip
# vllm#45388, #50687, sglang#36033: a completion that never comes is waited for.
plant("loads_are_waited_for_without_end", "P41", "waits", tier_manager.TierManager, "finish_load",
      "if job not in self._loads:", "if job not in self._loads or not job.is_done:")  # fmt: skip
# sglang#27024: what is pinned for others keeps a request from running.
plant("stores_are_not_given_up_for_requests", "P41", "late_stores", tier_manager.TierManager,
      "cancel_stores", "jobs = [*self._stores]", "jobs = []")  # fmt: skip

# A peer is asked by content, and believed only as far as its answer shows.

# vllm#52234: an answer to another question, with another prompt's bytes.
plant("answers_of_a_peer_are_not_compared_with_questions", "P37", "peer_misbehaves", peer.PeerTier,
      "_ask", "!= (key, self._session, self._number)", "== ()")  # fmt: skip
plant("answers_of_a_peer_have_no_checksum", "P37", "peer_misbehaves", peer.PeerTier, "_ask",
      "if checksum_of(payload) != header.checksum:", "if False:")  # fmt: skip
# sglang#23746: the other side has another number of ranks.
plant("answers_of_a_peer_may_mean_something_else", "P37", "peer_misbehaves", peer.PeerTier, "_ask",
      "if header.meaning != self._meaning:", "if False:")  # fmt: skip
plant("peers_of_another_layout_are_served", "P37", "peer_is_a_stranger", peer_server.PeerSession,
      "agree", "AGREED if meaning == server.manager.meaning else OTHER_MEANING",
      "AGREED")  # fmt: skip
plant("peers_without_the_secret_are_served", "P37", "peer_is_a_stranger", peer_server.PeerSession,
      "agree", "status = OTHER_SECRET", "pass")  # fmt: skip
# sglang#37160: salts are ignored below the GPU; here beyond the process.
plant("contents_with_a_salt_are_named_to_peers", "P37", "peer_serves", peer_server.PeerSession,
      "news", "if not is_private(key):", "if True:")  # fmt: skip
plant("contents_with_a_salt_are_served_to_peers", "P37", "peer_is_a_stranger",
      peer_server.PeerSession, "_find", "if is_private(key) or", "if")  # fmt: skip
plant("keys_do_not_say_that_there_is_a_salt", "P37", "peer_serves", tier_manager.TierManager,
      "_part", "_is_salted(first.node, salted)", "False")  # fmt: skip
plant("the_length_that_a_peer_asks_for_is_believed", "P24", "peer_is_a_stranger",
      peer_server.PeerSession, "_find", "if length != manager.copy_bytes(group):",
      "if False:")  # fmt: skip
plant("a_reset_is_not_waited_for_by_an_answer", "P37", "peer_resets", peer_server.PeerSession,
      "_find", "if payload is not None and epochs == [tier.epoch for tier in tiers]:",
      "if payload is not None:")  # fmt: skip
plant("a_reset_of_the_peer_is_not_heard_by_loads", "P38", "peer_resets", peer.PeerTier, "_apply",
      "self.epoch += 1", "self._num_losses += 0")  # fmt: skip
plant("a_peer_is_asked_again_after_a_reset", "P37", "peer_resets", peer.PeerTier, "clear",
      "self._refused |= self._known", "pass")  # fmt: skip
plant("misses_of_a_peer_are_not_counted", "P37", "peer_misbehaves", peer.PeerTier, "_note",
      "self.stats.faults[fault] += 1", "pass")  # fmt: skip
plant("a_peer_is_waited_for_without_end", "P41", "peer_serves", peer.PeerTier, "_ask",
      "time.monotonic() + _ANSWER_S", 'float("inf")')  # fmt: skip
plant("what_a_peer_has_evicted_is_still_asked_for", "P21", "peer_evicts", peer.PeerTier, "_apply",
      "self._known.difference_update(went)", "pass")  # fmt: skip

# A peer's memory is read, and whatever fails there costs only time.

plant("memory_of_a_peer_is_never_read", "P24", "peer_is_read", peer.PeerTier, "_begin",
      "self._reads = self._reader is not None", "pass")  # fmt: skip
plant("copies_that_are_read_have_no_checksum", "P37", "peer_is_read", peer.PeerTier, "_ask",
      "if checksum_of(payload) != header.checksum:", "if False:")  # fmt: skip
plant("a_copy_that_cannot_be_read_is_lost", "P24", "peer_is_read", peer.PeerTier, "_read",
      "return self._ask(key, length)", "return None")  # fmt: skip
plant("failures_of_memory_are_not_counted", "P37", "peer_is_read", peer.PeerTier, "_read",
      "self.stats.faults[fault] += 1", "pass")  # fmt: skip
# ai-dynamo/nixl: a transfer that was given up may still write where it was to.
plant("a_reader_that_has_failed_is_used_again", "P38", "peer_is_read", peer.PeerTier, "_read",
      "self._close_reader()", "pass")  # fmt: skip
plant("a_peer_asks_on_before_it_has_read", "P38", "peer_is_read", peer.PeerTier, "_receive",
      "channel.send([READ], deadline_s)", "pass")  # fmt: skip
plant("memory_is_read_without_a_deadline", "P41", "peer_is_read", peer.PeerTier, "_receive",
      "reader.read(self._place, length, deadline_s)",
      'reader.read(self._place, length, float("inf"))')  # fmt: skip

# Found by the machine with all rules, without a story and without a chosen seed.

UNAIDED = {
    "records_of_another_segment_are_taken_in": (
        "P24 P37 P39", disk.DiskTier, "_scan_segment", "header.segment != number", "False",
    ),
    "a_write_that_was_short_counts_as_whole": (
        "P37", disk.DiskTier, "_scan_segment",
        "offset + RECORD_BYTES + header.length > size", "False",
    ),
    "records_are_written_behind_a_torn_one": (
        "P24", disk.DiskTier, "_scan_segment", "self._trim(number, offset)", "pass",
    ),
}  # fmt: skip
