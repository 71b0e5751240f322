"""The rows of the corpus: what went wrong, where it is told, and the tests that try to say it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One real bug.

    Attributes:
        bug: what went wrong and why, in our words.
        source: the public threads.
        tests: tests that try to express it, as path::name.
        reason: why it does not concern an allocator, where neither a test nor a planted bug can.
    """

    bug: str
    source: str
    tests: tuple = ()
    reason: str = ""


HERE = "tests/kvcore/test_inexpressible.py::test_"
HASHING = "tests/kvcore/identity/test_namespace.py::test_"
DETERMINISM = "tests/kvcore/test_determinism.py::test_"
HOSTILE = "tests/kvcore/test_hostile.py::test_"
SCHEDULER = "tests/model/control/test_scheduler.py::test_"
ENGINE = "tests/model/test_engine.py::test_"
TRITON = "tests/backends/test_triton.py::test_"

ROWS = {
    1: Row(
        "a fork counts references by table entry, a window repeats a block there: freed twice",
        "vLLM #1556, PR #3347",
    ),
    2: Row(
        "one block is named twice in one call to free, enters the queue twice, and the queue hands "
        "out its own sentinel",
        "vLLM #42571",
    ),
    3: Row(
        "minus one block is asked for, and the counter of free blocks rises",
        "vllm-ascend #14283, #15990, PR #14301",
    ),
    4: Row(
        "every release puts the block into the free list once more",
        "TensorRT-LLM PR #14937",
    ),
    5: Row(
        "the block that a look-up finds is pinned, not the one that the sequence has; unpinning "
        "lets go of the wrong one",
        "TensorRT-LLM #12560, PR #12648",
    ),
    6: Row(
        "a block is taken from the free list of the wrong tier, and both lists miscount",
        "TensorRT-LLM #11879, PR #12834",
    ),
    7: Row(
        "two places infer the committed length, and both release the last slot",
        "SGLang PR #12224; sglang-jax #982, #994",
    ),
    8: Row(
        "a block that is written again each step is cached, and the tree owns it twice",
        "SGLang #35270, PR #35781",
    ),
    9: Row(
        "an abort in the middle of a prefill frees two runs of tokens that share a page",
        "SGLang #38981",
    ),
    10: Row("clearing frees what is held, eviction takes what is pinned", "LMCache #987, PR #993"),
    11: Row("null placeholders reach the call that frees blocks", "UCM PR #1053"),
    12: Row(
        "an aborted load from afar waits for a completion that never comes",
        "vLLM #46283, PR #46289",
    ),
    13: Row("an abort between look-up and allocation keeps the look-up's locks", "vLLM #44100"),
    14: Row(
        "a look-up pins what it finds, and it is never fetched: pinned for ever",
        "LMCache #1034",
    ),
    15: Row(
        "what a transfer held is not let go when it ends",
        "LMCache PR #3884, #1756, #1130, PR #1173",
    ),
    16: Row("a batch of evictions takes what a reader still holds", "LMCache PR #3130"),
    17: Row(
        "something is taken, then the schedule fails, and it is not given back",
        "SGLang #15840, PR #16067",
    ),
    18: Row(
        "at an abort the part of the sequence after its last whole block is forgotten",
        "sglang-jax PR #1000, #984",
    ),
    19: Row(
        "a sequence is removed before its blocks are noted: they are lost",
        "TensorRT-LLM #12933, PR #15018",
    ),
    20: Row("finished requests keep their references, so nothing can be evicted", "vmlx PR #68"),
    21: Row("blocks are handed out with a count of zero, and freeing takes it below", "MinivLLM"),
    22: Row("a block leaves the queue of the evictable and stays in the index", "vLLM PR #4764"),
    23: Row("reuse resets the block and not the map from its hash", "nano-vllm #163"),
    24: Row("an evicted block keeps its hash", "kvcached #362, PR #363"),
    25: Row("a priority queue and a table of free blocks drift apart", "vLLM #16825"),
    26: Row(
        "the name of a partial block comes alive again when the block is full: stored twice",
        "vLLM #49125",
        (f"{HERE}a_part_of_a_block_has_no_name_that_could_be_promoted",),
    ),
    27: Row(
        "tokens are cut, their hashes are not",
        "vLLM #49377, #49449, PR #52806, #53156",
    ),
    28: Row(
        "a window's page is freed, and the map that still names it frees it again",
        "SGLang PR #27586",
    ),
    29: Row(
        "a cached function returns a list that its caller extends",
        "SGLang PR #26939",
        (
            f"{HERE}nothing_that_a_call_returns_can_be_changed_from_outside",
            f"{HERE}names_that_a_caller_extends_do_not_come_back_extended",
        ),
    ),
    30: Row(
        "blocks are cached although caching is off, and never evicted",
        "vllm-ascend PR #2083; vLLM PR #19435, #24084",
    ),
    31: Row(
        "pages that a window has given back are shown as reusable",
        "SGLang PR #29349, #30845",
    ),
    32: Row(
        "every chain of hashes begins at one constant, with a hash that is easy to collide",
        "vLLM PR #12621, GHSA-rm76-4mrf-v9r8",
    ),
    33: Row(
        "pixels are hashed without their shape",
        "vLLM PR #17378, GHSA-c65p-x677-fgj6; dynamo PR #8340",
    ),
    34: Row(
        "an image's hash is cut to 16 bits",
        "LMCache #3301, #4086, PR #4783, #4415",
    ),
    35: Row("the adapter is not in the key", "vLLM #3264, PR #3263"),
    36: Row(
        "the key has the adapter's name, not its version: a reload serves old KV",
        "vLLM #30931, #42125, PR #42495, #48352",
    ),
    37: Row(
        "an adapter's name and a salt are strings in one tuple: equal ones are one",
        "vLLM #44701; SGLang #24638",
    ),
    38: Row("the store outside has a key function of its own, without the adapter", "vLLM #44250"),
    39: Row("where in the block an image stands is not in the key", "vLLM PR #36708"),
    40: Row(
        "which rows are embeddings is not in the key",
        "vLLM #56655, PR #56656",
    ),
    41: Row(
        "what cannot be described gets an empty key and is cached",
        "TensorRT-LLM PR #13815",
        (f"{HERE}what_cannot_be_described_is_refused_and_never_cached_without_a_key",),
    ),
    42: Row(
        "digests that are short or easy to collide decide a hit, contents are not compared",
        "vLLM PR #54727; openvino.genai #3722, PR #3723; vllm-mlx PR #444",
    ),
    43: Row(
        "an image's identity is squeezed into token ids",
        "SGLang #2151",
        (f"{HERE}an_image_whose_bytes_are_token_ids_is_no_text",),
    ),
    44: Row(
        "groups have blocks of different sizes, the hashes one granularity",
        "kvcached #446, PR #451",
    ),
    45: Row(
        "keys differ from process to process: never a hit, without an error",
        "LMCache #2979, #1139; vLLM PR #51875; DingoCache PR #77",
        (
            f"{HASHING}names_and_ids_are_the_same_in_a_process_with_another_hash_seed",
            f"{DETERMINISM}processes_with_other_hash_seeds_give_the_same_ids",
        ),
    ),
    46: Row(
        "a digest of a general serialisation depends on the identity of objects and on their type",
        "vLLM 0.22.1, measured",
        (
            f"{HERE}equal_requests_have_equal_names_whatever_their_objects_are",
            f"{HASHING}integer_types_and_string_objects_do_not_change_the_bytes",
        ),
    ),
    47: Row("blocks are taken before the hits are held, which evicts them", "vLLM PR #10507"),
    48: Row(
        "hits are held before the room is checked, and stay held when there is none",
        "vLLM #11562, PR #11565",
    ),
    49: Row("a free block counts as a hit and as room", "vLLM PR #6849"),
    50: Row(
        "the length of a hit is remembered from the first look, and the cache has changed since",
        "vLLM PR #17305",
    ),
    51: Row(
        "a handle is used after what it names was given back",
        "vLLM #37076, PR #37164, #41400, #38606, #39146",
    ),
    52: Row("reviving a free block forgets its content", "ROCm/ATOM PR #902"),
    53: Row(
        "the schedule is computed as if nothing hit, the allocation hits",
        "nano-vllm PR #211, #233",
    ),
    54: Row("reusable blocks are counted too high", "TensorRT-LLM PR #12665"),
    55: Row(
        "what is available is asked first and taken later, and the difference is an assert",
        "kvcached #262, PR #301",
        (f"{HERE}room_that_somebody_else_took_is_a_typed_error_and_changes_nothing",),
    ),
    56: Row("a counter changes before the check that fails", "vLLM PR #24228"),
    57: Row("a hit of the whole prompt leaves nothing to compute", "vLLM PR #11186"),
    58: Row(
        "a prompt of whole blocks, all of them cached, gives an empty query",
        "nano-vllm #144, PR #199",
    ),
    59: Row("asking for room and taking it count the new token differently", "nano-vllm PR #66"),
    60: Row("room is made past the longest sequence, past the width of a table", "vLLM PR #10730"),
    61: Row(
        "sizing and running use two formulas, which differ at exact multiples",
        "TensorRT-LLM PR #16173",
    ),
    62: Row("a block is granted and the runner never hears of it", "vllm-rbln PR #662"),
    63: Row(
        "a place in a window is computed as in a ring, wrong before it is full and after it wraps",
        "transformers PR #47708, #47911",
    ),
    64: Row("a match that rounds to nothing leaves an empty node in the tree", "SGLang PR #28692"),
    65: Row("room beyond the tokens is trimmed by count, from the wrong end", "vLLM #43996"),
    66: Row(
        "a group's blocks are found with another group's index",
        "vLLM #55600, PR #55601, #53142",
    ),
    67: Row(
        "a batch is rejected, and its prefix can be hit although it was not computed",
        "TGI PR #2489",
    ),
    68: Row("a block that is only scheduled is hit in the same step", "vLLM PR #29387"),
    69: Row(
        "a chunk is published in the middle of its prefill",
        "SGLang #38319, PR #38355",
    ),
    70: Row(
        "what is stored goes by the length of the prompt, not by what is computed",
        "TensorRT-LLM #12673, #12769, #12786, #12819",
    ),
    71: Row(
        "a load fails, and others go on with what never arrived",
        "vLLM PR #19330, #19329, #50388",
        (f"{HOSTILE}a_failed_load_reaches_what_a_fork_published_before_it_went",),
    ),
    72: Row("a hash is registered for a block that is half full", "nano-vllm PR #218; ATOM #902"),
    73: Row("drafts are counted as proposed, not as accepted", "vLLM PR #18668, #19006"),
    74: Row(
        "a drafter's own KV is never written for tokens that the target restores",
        "vLLM PR #47926",
        (f"{HERE}a_prefix_counts_as_computed_only_where_every_group_has_it",),
    ),
    75: Row(
        "a window's state is found by the request's place, not by its content",
        "SGLang PR #30339",
    ),
    76: Row(
        "a request is freed while the next step, which writes its blocks, is in flight",
        "vLLM PR #45357; vllm-ascend #14055; tpu-inference PR #3449",
    ),
    77: Row(
        "a window moves with scheduled tokens, and the drafts are rejected",
        "vLLM #47282, PR #47728; vllm-ascend #13501",
    ),
    78: Row(
        "an abort frees pages, and the transfer into them goes on",
        "vLLM PR #32255; SGLang PR #35049, #32564",
    ),
    79: Row(
        "one flag stands for two transfers; a late completion is a crash",
        "vLLM #46240, #43226, PR #56089, #55286",
    ),
    80: Row(
        "one table buffer serves two batches while it is still being copied",
        "TensorRT-LLM PR #15546",
        (f"{HERE}a_table_that_was_given_out_never_changes",),
    ),
    81: Row(
        "blocks are used again before their transfer is done",
        "TensorRT-LLM #8813, PR #9056",
    ),
    82: Row("pages are taken back while a submitted batch names them", "kvcached #463"),
    83: Row(
        "duplicates are freed, and the table goes on naming them",
        "mini-sglang PR #142",
    ),
    84: Row(
        "preempted blocks wait in a list that the scheduler does not see: it preempts on and on",
        "vllm-ascend #16315; vLLM PR #49675",
    ),
    85: Row(
        "an event says removed with the first of several copies",
        "vLLM PR #55092, #48933",
    ),
    86: Row("the second copy of a content gets no identity", "kvcached #401, PR #402"),
    87: Row(
        "twins of one step overwrite each other in the index",
        "nano-vllm #219, PR #243",
    ),
    88: Row("stores are told before removals that came first", "TensorRT-LLM PR #11883"),
    89: Row("frees that were held back lose their order", "vLLM #48489"),
    90: Row("what is computed again after a preemption counts as a hit", "vLLM #25780"),
    91: Row("fewer blocks are evicted than asked for, without a word", "xLLM PR #55"),
    92: Row(
        "weights change, and the cache is not reset, or says so and is not",
        "vLLM #9744, PR #12284; SkyRL PR #1824; NeMo-RL PR #4018; lmdeploy #4917; vllm-omni #6739",
    ),
    93: Row("a reset keeps the scrambled order of the free blocks", "vLLM #40244"),
    94: Row("the cache resets itself without a request to", "vLLM PR #46125, #45093"),
    95: Row("the head of a prompt is reused before its tail", "vLLM #42948, PR #42985"),
    96: Row(
        "each pass of finding a common prefix drops a block: never a hit",
        "vLLM #51771, #32802, PR #39171, #39690, #33270; 1Cat #205",
    ),
    97: Row(
        "null entries count as cached, so nothing after them is ever cached",
        "vLLM PR #42547",
    ),
    98: Row(
        "loads take the blocks that running prefills need, and nothing moves any more",
        "vLLM #45388, PR #44560",
        (
            f"{SCHEDULER}a_request_starts_only_where_every_running_one_could_take_another_block",
            f"{ENGINE}an_engine_whose_blocks_someone_else_holds_says_so_and_does_not_spin",
        ),
    ),
    99: Row(
        "a request is admitted when its first chunk fits, and all requests preempt each other",
        "vLLM #25538, PR #37307",
    ),
    100: Row(
        "after everything was evicted there are still hits",
        "local-inference-lab/vllm #480",
    ),
    101: Row(
        "a page number times a stride overflows 32 bits",
        "vLLM #1486, PR #47671, #50427, #50483",
        (
            "tests/kvcore/tables/test_slots.py::test_slots_are_wider_than_32_bits",
            "tests/backends/test_numba.py::test_a_cache_past_2_to_the_31_elements",
        ),
    ),
    102: Row(
        "a block id is cut to 16 bits",
        "aiter #3062; ATOM #702",
        (
            f"{HERE}block_ids_past_65535_and_slots_past_2_to_the_31_arrive_whole",
            f"{TRITON}on_a_gpu_block_ids_past_65535_and_offsets_past_2_to_the_31_elements",
        ),
    ),
    103: Row(
        "a ref count equal to the number of running requests is read as shared by all of them",
        "vLLM #23130, PR #23485, #55227",
    ),
}
"""Every row by its number."""
