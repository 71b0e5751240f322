"""vLLM's tiers on a CPU: its specification, with a worker that copies by hand.

`TieringOffloadingSpec` runs on GPUs alone: `CPUOffloadingSpec.get_worker` refuses other platforms,
and its worker copies in CUDA or XPU streams between events. All else of it works on a CPU: the
scheduler's half, the shared region of host memory, the tiers. So `spec_module_path`, which vLLM
has for this, names the specification below, whose worker copies when it is asked.
"""

from itertools import accumulate, pairwise

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies blocks to rows of host memory and back, before the call returns."""

    def __init__(self, kv_caches, blocks_per_chunk, region):
        self.groups, self.blocks_per_chunk = kv_caches.group_data_refs, blocks_per_chunk
        self.region, self.ended = region, []
        self.device = [one.tensor.view(torch.int8) for one in kv_caches.tensors]
        sizes = [one.page_size_bytes for one in kv_caches.tensors]
        self.host = [
            region.create_next_worker_view(size * blocks_per_chunk).unflatten(
                1, (blocks_per_chunk, size)
            )
            for size in sizes
        ]

    def places(self, device_spec, host_spec):
        """Yield (layer, block of the device, chunk, place in the chunk) of all that moves."""
        chunks = iter(host_spec.block_ids.tolist())
        ends = [0, *accumulate(device_spec.group_sizes)]
        spans = zip(pairwise(ends), device_spec.block_indices, self.groups, strict=True)
        for (start, stop), index, refs in spans:
            chunk = None
            for number, block in enumerate(device_spec.block_ids[start:stop].tolist(), index):
                place = number % self.blocks_per_chunk
                if chunk is None or not place:
                    chunk = next(chunks)
                for ref in refs:
                    yield ref, block, chunk, place

    def submit_store(self, job_id, src_spec, dst_spec):
        count = 0
        for ref, block, chunk, place in self.places(src_spec, dst_spec):
            size, layer = ref.page_size_bytes, ref.tensor_idx
            self.host[layer][chunk, place, :size] = self.device[layer][block, :size]
            count += size
        return self.end(job_id, count)

    def submit_load(self, job_id, src_spec, dst_spec):
        count = 0
        for ref, block, chunk, place in self.places(dst_spec, src_spec):
            size, layer = ref.page_size_bytes, ref.tensor_idx
            self.device[layer][block, :size] = self.host[layer][chunk, place, :size]
            count += size
        return self.end(job_id, count)

    def end(self, job_id, count):
        self.ended.append(TransferResult(job_id, True, count))
        return True

    def get_finished(self):
        ended, self.ended = self.ended, []
        return ended

    def wait(self, job_ids):
        """Everything has ended already."""

    def shutdown(self):
        self.host = []
        self.region.cleanup()


class OnCpu(TieringOffloadingSpec):
    """vLLM's own, but for the worker."""

    def get_worker(self, kv_caches):
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return CopyingWorker(kv_caches, self.blocks_per_chunk, region)
