"""The engine of a loaded model: its network, caches, scheduler, sampler and drafts, put together.

Decides: the size of the caches, which drafter is used, and what is prepared before the first
request. `EngineCore` runs the steps.

Does not know: how blocks are found (`kvcore`), how attention is computed (`backends`), arguments of
a command line.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import backends
import kvcore
from model.caches.host_memory import HostPool
from model.caches.memory import MemoryPlan, plan_memory
from model.caches.swap import BlockMover, plan_host_blocks
from model.control.config import EngineConfig, SchedulerConfig
from model.control.drafts import Drafter, NgramDrafts
from model.control.images import PromptImages, check_count
from model.control.params import SamplingParams
from model.control.request import Request
from model.control.scheduler import Scheduler
from model.control.submission import Submission
from model.engine_core import EngineCore
from model.errors import InvalidArgumentError, ModelNotFoundError, UnsupportedModelError
from model.forward.batch_invariant import BatchInvariantNetwork
from model.forward.draft_model import DraftModel
from model.forward.image_encoder import ImageEncoder
from model.forward.network import PagedNetwork
from model.forward.quantised import quantise
from model.forward.sanitized import SanitizedBackend
from model.forward.step_runner import StepRunner
from model.forward.warm_up import free_bytes, prepare_network
from model.load.images import NoImages
from model.load.loader import LoadedModel
from model.sample.grammars import Grammars
from model.sample.request_sampler import RequestSampler
from model.twins import TwinCore

if TYPE_CHECKING:
    from model.control.tier_transfers import TierTransfers
    from model.forward.lora import Adapter

_LINE_BYTES = 500  # of an error that another rank reports
_TRIED_TOKENS = 32
_TRIED = [  # the parameters tried at the start; code for others loads with the first such request
    SamplingParams(ignore_eos=True),
    SamplingParams(ignore_eos=True, temperature=1.0),
    SamplingParams(ignore_eos=True, temperature=1.0, top_k=20, top_p=0.9),
    SamplingParams(ignore_eos=True, logprobs=1, presence_penalty=0.1),
]


class Engine(EngineCore):
    """Runs requests on a loaded model.

    On a GPU whose memory is measured, making one takes most of what `prepare` does.

    Args:
        model: its attention is switched to the paged one.
        backend: runs attention and holds the caches.
        config: sizes.
        caches_of: an engine of the same model whose caches this one overwrites, in place of its
            own; it must have run nothing yet. Its number of blocks is this one's too.

    Attributes:
        draft: the draft model of speculative decoding; None: there is none.
        images: runs the vision tower; None: the model takes no images.

    Raises:
        InvalidArgumentError: a size is out of range, or memory is too small for it.
        UnsupportedModelError: the model cannot run with a paged cache, or not on this backend.
    """

    draft: DraftModel | None
    _model: LoadedModel
    _runner: StepRunner

    def __init__(
        self,
        model: LoadedModel,
        backend: backends.Backend,
        config: EngineConfig | None = None,
        *,
        caches_of: "Engine | None" = None,
    ) -> None:
        self.config = config or EngineConfig()
        self._backend = backend
        self._sanitizer = SanitizedBackend(backend) if self.config.sanitize else None
        if caches_of is None:
            watched = cast("backends.Backend", self._sanitizer or backend)
            self.network = _network(model, watched, self.config)
            self.config = _fitted(self.config, self.network)
            if self.config.has_adapters:
                _add_adapters(self.network, model, self.config)
            ahead = _draft_network(model, backend, self.config)
            self.memory = _allocate(model, self.network, ahead, self.config)
        else:
            self.network, self.memory = caches_of.network, caches_of.memory
            ahead = None if caches_of.draft is None else caches_of.draft.network
            size, wanted = self.config.block_size, self.memory.block_size
            if size != wanted:
                raise InvalidArgumentError(
                    f"block_size: wanted {wanted}, which the caches have, got {size}"
                )
        self.config = _limited(self.config, self.network)
        kv = kvcore.KVCacheManager(
            self.network.num_blocks,
            self.config.block_size,
            groups=self.network.layout.groups(self.config.block_size),
            enable_caching=self.config.enable_prefix_caching,
            record_events=_event_hash(self.config),
            record_lifetimes=self.config.record_lifetimes,
            prefault=self.config.prefault,
        )
        self.num_host_blocks = plan_host_blocks(
            self.config, model.network, self.network.layout, self.memory
        )
        if model.ranks is not None:
            self.num_host_blocks = model.ranks.all_reduce_min(self.num_host_blocks)
        by_default = backend.device.type == "cuda" and not self.config.is_speculative
        is_asked = self.config.async_scheduling
        beside = None if caches_of is None else caches_of.draft
        draft = None if ahead is None else DraftModel(model, ahead, self.config, beside=beside)
        drafter: Drafter | None = NgramDrafts() if self.config.drafts == "ngram" else draft
        grammars = _grammars(model, self.network.vocab_size, self.config)
        self._sampler = RequestSampler(
            self.network.vocab_size, self.network.device, self.config.seed, grammars, model.ranks
        )
        self.images = _image_encoder(model, self.network, self.config)
        self._runner = StepRunner(
            self.network,
            BlockMover(self.network.backend, self.network.caches),
            self._sampler,
            max_sampled=self.config.max_num_seqs,
            is_async=by_default if is_asked is None else is_asked,
            sanitizer=self._sanitizer,
            drawn=None if caches_of is None else caches_of._runner.drawn,  # noqa: SLF001
            images=self.images,
        )
        self.draft = draft
        tiers = self._open_tiers(model, kv) if self.config.has_tiers else None
        scheduler = Scheduler(kv, self._limits(model.max_positions), drafter, tiers)
        size = self.network.vocab_size
        super().__init__(model, kv, scheduler, self._runner, grammars, size, tiers)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The LoRA adapters that requests may ask for. O(adapters)."""
        return () if self.network.adapters is None else self.network.adapters.names

    @property
    def adapter_versions(self) -> dict[str, int]:
        """The versions of these adapters, by name. O(adapters)."""
        return {} if self.network.adapters is None else self.network.adapters.versions

    def read_adapter(self, text: str) -> "Adapter":
        """Read a LoRA adapter, `NAME=PATH`, for `add_adapter`; from any thread. O(its bytes).

        Raises:
            InvalidArgumentError: it is not of this form, or `max_loras` is not set.
            ModelError: it is not there, broken, or not one for this network.
        """
        if self.config.max_loras is None:
            raise InvalidArgumentError("lora: wanted --max-loras, without which none is loaded")
        return self.network.read_adapter(text)

    def add_adapter(self, adapter: "Adapter") -> None:
        """Let requests ask for an adapter from now on. Between two steps; O(its weights).

        Raises:
            InvalidArgumentError: another one has its name, there are too many, or its rank is too
                large.
            UnsupportedModelError: it cannot be applied to this network exactly.
        """
        self.network.add_adapter(adapter, self._namespaces())

    def remove_adapter(self, name: str) -> None:
        """Take no more requests for an adapter; those that are unfinished keep it. Between steps.

        Raises:
            InvalidArgumentError: there is no such adapter, or `max_loras` is not set.
        """
        if self.config.max_loras is None or self.network.adapters is None:
            raise InvalidArgumentError("lora: wanted --max-loras, without which none is unloaded")
        self.network.adapters.remove(name, self._namespaces())

    def _namespaces(self) -> list[kvcore.Namespace]:
        return [request.namespace for request in self._scheduler.unfinished]

    def submit(self, asked: Submission) -> list[Request]:
        """Queue a submission: a request for each sample. O(samples * prompt).

        Raises:
            InvalidArgumentError: as `EngineCore.submit`, an adapter that `lora` does not name, or
                images for a model of text.
        """
        if asked.images is not None:
            self._check_images(asked.images, asked.params)
        name = getattr(asked.namespace, "lora_name", None)
        if name is not None:
            if self.network.adapters is None:
                raise InvalidArgumentError(
                    f"lora_name: wanted None, since there are no adapters (--lora), got {name!r}"
                )
            asked = replace(asked, namespace=self.network.adapters.resolve(asked.namespace))
        return super().submit(asked)

    @property
    def image_limits(self) -> tuple[int, int]:
        """The most images of a prompt, and the most bytes of one. O(1)."""
        return self.config.max_images, self.config.max_image_bytes

    def check_images(self, count: int) -> None:
        """Raise unless a prompt may have this number of images. O(1)."""
        if count and isinstance(self._model.images, NoImages):
            raise InvalidArgumentError(f"image: {self._model.images.why}")
        check_count(count, self.config.max_images)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        images: Sequence[object] = (),
        *,
        opens_answer: bool = True,
        options: Mapping[str, object] | None = None,
    ) -> tuple[list[int], PromptImages | None]:
        """Return the tokens of a conversation, and its images. O(text + pixels)."""
        how: dict[str, Any] = {"opens_answer": opens_answer, "options": options}
        if not images:
            return super().encode_chat(messages, **how)
        return self._model.images.encode_chat(messages, images, self.config, **how)

    def _check_images(self, images: PromptImages, params: SamplingParams) -> None:
        """Refuse images that this engine cannot compute. O(images)."""
        if isinstance(self._model.images, NoImages):
            raise InvalidArgumentError(f"image: {self._model.images.why}")
        if not images.is_whole:
            return
        longest, config = max(item.length for item in images.items), self.config
        room = config.max_num_batched_tokens - config.max_num_seqs
        windows = [window for window in self.network.layout.windows if window is not None]
        if longest > room:
            raise InvalidArgumentError(
                f"image: wanted at most {room} tokens of one, which one step computes "
                f"(--max-num-batched-tokens less --max-num-seqs), got {longest}"
            )
        if longest > min(windows, default=longest):
            raise InvalidArgumentError(
                f"image: wanted at most {min(windows)} tokens of one, the model's window, "
                f"got {longest}"
            )
        if self.keeps_states or params.prompt_logprobs is not None:
            what = "recurrent layers" if self.keeps_states else "prompt_logprobs"
            raise InvalidArgumentError(
                f"image: {what} cannot be combined with images whose tokens see each other"
            )

    def _open_tiers(self, model: LoadedModel, kv: kvcore.KVCacheManager) -> "TierTransfers":
        """Open host memory and disk behind the caches. Reads all weights once.

        Raises:
            InvalidArgumentError: a tier cannot start, or a peer is asked for with several ranks.
        """
        network, sanitizer = self.network, self._sanitizer
        if model.ranks is not None and (self.config.peer or self.config.serve_kv):
            name = "peer" if self.config.peer else "serve_kv"
            raise InvalidArgumentError(f"{name}: cannot be used with --tp")

        def began(lease: kvcore.Lease) -> None:
            if sanitizer is not None:
                sanitizer.begin_load(lease, network.caches)

        lock = None if sanitizer is None else sanitizer.lock
        pool = HostPool(network.backend, network.caches.storages, lock)
        tiers = import_module("model.caches.tiers")  # not loaded where there are none
        opened: TierTransfers = tiers.open_tiers(
            self.config,
            model.network,
            network.layout,
            network.scales,
            kv,
            tiers.PooledBlocks(pool, began),
            model.ranks,
        )
        return opened

    def _limits(self, max_positions: int | None) -> SchedulerConfig:
        rope = self.network.rope
        lengths = [length for length in (max_positions, self.config.max_model_len) if length]
        return SchedulerConfig(
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=min(lengths, default=None),
            watermark=self.config.watermark,
            priority_span=self.config.priority_span,
            draft_tokens=self.config.most_drafts,
            num_host_blocks=self.num_host_blocks,
            long_above=None if rope is None else rope.num_tokens,
            may_cross=rope is None or rope.recomputes,
        )

    @property
    def model(self) -> LoadedModel:
        """The model that it runs. O(1)."""
        return self._model

    def prepare(self) -> str:
        """Do now what the first requests would wait for; in words how the network runs then.

        Compiles kernels, traces and compiles the network and captures CUDA graphs, as `config` asks
        and `forward/warm_up.py` decides: seconds, half a minute where all is compiled for the
        first time, all but the capture in the constructor where that measures memory. A few
        requests run then on another engine that is thrown away: what they count and find is
        forgotten with it, and the blocks that they wrote are free. Nothing may run meanwhile.

        Raises:
            InvalidArgumentError: there is no memory left for it.
        """
        prepared = prepare_network(
            self.network, self.config, self._runner.drawn, self._model.max_positions
        )
        self._runner.use(prepared)
        ahead = None if self.draft is None else self.draft.prepare()
        sizes = replace(
            self.config.without_tiers(),
            enable_prefix_caching=False,
            record_events=False,
            record_lifetimes=False,
        )
        trial = Engine(self._model, self._backend, sizes, caches_of=self)
        trial._runner.use(prepared)
        if trial.draft is not None and ahead is not None:
            trial.draft.use(ahead)
        room = self.max_model_len - 1
        answer = min(2 + self.config.most_drafts, room)  # with draft tokens
        if answer > 0:
            prompts = [[0] * min(_TRIED_TOKENS, room + 1 - answer)] * len(_TRIED)
            trial.generate(prompts, [replace(each, max_tokens=answer) for each in _TRIED])
        if self.network.device.type == "cuda" and answer > 0:  # where a long step takes no time
            longest = min(self.config.max_num_batched_tokens, room)
            trial.generate([[0] * longest], SamplingParams(max_tokens=1, ignore_eos=True))
        return prepared.how if ahead is None else f"{prepared.how}; draft model: {ahead.how}"

    def describe_memory(self) -> str:
        """Return a line on the memory of the caches, and its reason. O(num_layers)."""
        beside = None if self.draft is None else self.draft.network.layout
        return self.memory.describe(self.network.layout, beside)

    def empty_cache(self, *, enable_caching: bool) -> None:
        """Empty the prefix cache, that of the draft model too. O(contents)."""
        super().empty_cache(enable_caching=enable_caching)
        if self.draft is not None:
            self.draft.empty_cache(enable_caching=enable_caching)


class _Loaded(NamedTuple):
    text: str
    version: int


class _Unloaded(NamedTuple):
    name: str


class TwinEngine(TwinCore, Engine):
    """An engine that runs on every rank of a network that was cut.

    Args:
        model: the model as each rank has loaded it; it has `ranks`.
        backend: computes attention on this rank.
        config: the same on every rank.
        is_checked: compare the block tables of all ranks before every pass; one round trip each.

    Raises:
        InvalidArgumentError: the model is whole, or as for `Engine`.
        RankLostError: another rank is gone.
    """

    def __init__(
        self,
        model: LoadedModel,
        backend: backends.Backend,
        config: EngineConfig | None = None,
        *,
        is_checked: bool = False,
    ) -> None:
        if model.ranks is None:
            raise InvalidArgumentError("model: it was not loaded for tensor parallelism")
        super().__init__(model, backend, config, ranks=model.ranks, is_checked=is_checked)

    def prepare(self) -> str:
        """Prepare all ranks as an engine.

        Raises:
            RankLostError: another rank is gone.
        """
        with self._ranks.detecting_loss(or_fail=True):
            return super().prepare()

    def add_adapter(self, adapter: "Adapter") -> None:
        """Add an adapter on all ranks or on none; the others read its files meanwhile.

        Raises:
            ModelError: as for `Engine`, or another rank cannot add it.
            RankLostError: another rank is gone.
        """
        self._tell(_Loaded(adapter.text, adapter.version))
        error = self._try_adapter(lambda: adapter)
        if error is not None:
            raise error

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter, on the other ranks before their next step."""
        super().remove_adapter(name)
        self._said.append(_Unloaded(name))

    def _obey(self, said: object, note: Callable[[list[Request]], object]) -> None:
        match said:
            case _Loaded():
                self._try_adapter(lambda: self._read_equal(said))
            case _Unloaded():
                super().remove_adapter(said.name)
            case _:
                super()._obey(said, note)

    def _read_equal(self, said: "_Loaded") -> "Adapter":
        adapter = self.read_adapter(said.text)
        if adapter.version != said.version:
            raise ModelNotFoundError(
                f"lora: {adapter.name}: wanted the files of rank 0, got others"
            )
        return adapter

    def _try_adapter(self, read: Callable[[], "Adapter"]) -> Exception | None:
        """Add an adapter on this rank, unless that fails on any; the error of this one or that."""
        own: Exception | None = None
        name = ""
        try:
            adapter = read()
            super().add_adapter(adapter)
            name = adapter.name
        except Exception as error:  # noqa: BLE001  # of broken files it may be any
            own = error
        line = b"" if own is None else str(own).encode(errors="replace")[:_LINE_BYTES] or b"?"
        lines = self._ranks.all_gather(line.ljust(_LINE_BYTES, b"\0"))
        failed = [rank for rank, each in enumerate(lines) if each.strip(b"\0")]
        if own is not None or not failed:
            return own
        super().remove_adapter(name)
        text = lines[failed[0]].strip(b"\0").decode(errors="replace")
        return ModelNotFoundError(f"lora: rank {failed[0]} cannot add it: {text}")


def engine_of(
    model: LoadedModel,
    backend: backends.Backend,
    config: EngineConfig | None = None,
    *,
    checks_ranks: bool = False,
) -> Engine:
    """Return an engine, or a twin of the engines on all ranks that share the model."""
    if model.ranks is None:
        return Engine(model, backend, config)
    return TwinEngine(model, backend, config, is_checked=checks_ranks)


def _network(model: LoadedModel, backend: backends.Backend, config: EngineConfig) -> PagedNetwork:
    """Return the network, with the dtype that its caches will store."""
    if config.batch_invariant:
        most = max(config.max_num_batched_tokens, config.max_rows)
        network: PagedNetwork = BatchInvariantNetwork(model, backend, most)
    else:
        network = PagedNetwork(model, backend)
    if config.kv_dtype == "fp8":
        block_size = _fitted(config, network).block_size
        quantise(network, block_size=block_size, vocab_size=network.vocab_size)
    return network


def _image_encoder(
    model: LoadedModel, network: PagedNetwork, config: EngineConfig
) -> ImageEncoder | None:
    """Return the runner of the vision tower; None: the model takes no images."""
    if isinstance(model.images, NoImages):
        return None
    size, windows = config.encoder_cache_bytes, network.layout.windows
    return ImageEncoder(model.network, model.images, size, windows, model.ranks)


def _add_adapters(network: PagedNetwork, model: LoadedModel, config: EngineConfig) -> None:
    adapters = [network.read_adapter(text) for text in config.lora]
    if model.ranks is not None and adapters:
        versions = b"".join([one.version.to_bytes(8, "little") for one in adapters])
        if len({*model.ranks.all_gather(versions)}) > 1:
            raise ModelNotFoundError("lora: wanted the same files on every rank, they differ")
    network.allow_adapters(config.max_loras, config.max_lora_rank, adapters)


def _fitted(config: EngineConfig, network: PagedNetwork) -> EngineConfig:
    """Return the configuration with blocks that hold the states of recurrent layers."""
    block_size = network.layout.fitting_block_size(config.block_size)
    return replace(config, block_size=block_size)


def _limited(config: EngineConfig, network: PagedNetwork) -> EngineConfig:
    """Return the configuration with as many requests at once as have a block, and a state, each."""
    least = 1 + network.layout.blocks_per_state(config.block_size)
    most = min(config.max_num_seqs, max(1, (network.num_blocks - 1) // least))
    return replace(config, max_num_seqs=most)


def _event_hash(config: EngineConfig) -> kvcore.HashAlgorithm | None:
    """Return the algorithm of the block hashes in events; with tiers, that of the copies' names."""
    if not config.record_events:
        return None
    return "sha256" if config.has_tiers else "xxh3-128"


def _grammars(model: LoadedModel, vocab_size: int, config: EngineConfig) -> Grammars:
    """Return the grammars of a model's texts; of several ranks only the first measures times."""
    leads = model.ranks is None or model.ranks.leads
    describe, ends = model.codec.describe, model.eos_token_ids
    return Grammars(describe, vocab_size, ends, config, measures=leads)


def _draft_network(
    model: LoadedModel, backend: backends.Backend, config: EngineConfig
) -> PagedNetwork | None:
    """Return the draft model's network likewise, with another sanitizer; None: there is none.

    Raises:
        InvalidArgumentError: the model was loaded without its draft model.
        UnsupportedModelError: its draft model keeps states.
    """
    if config.draft_model is None:
        return None
    if model.draft is None:
        raise InvalidArgumentError(
            f"draft_model: {model.name!r} was loaded without a draft model; load it with "
            "model.load.loader.with_draft"
        )
    if config.sanitize:
        backend = cast("backends.Backend", SanitizedBackend(backend))
    network = _network(model.draft, backend, config)
    if network.layout.states:
        raise UnsupportedModelError(
            f"draft_model: wanted a network without recurrent layers, got {model.draft.name!r}: "
            f"its states could not forget rejected draft tokens"
        )
    return network


def _allocate(
    model: LoadedModel, network: PagedNetwork, ahead: PagedNetwork | None, config: EngineConfig
) -> MemoryPlan:
    """Have the caches; on several ranks as many blocks as the one with the least memory has."""
    networks = [network] if ahead is None else [network, ahead]
    free = free_bytes(networks, config)
    if free is not None and not isinstance(model.images, NoImages):
        free = max(0, free - config.encoder_cache_bytes)
    plan = plan_memory(
        config,
        network.layout,
        is_gpu=network.device.type == "cuda",
        free_bytes=free,
        beside=None if ahead is None else ahead.layout,
    )
    if model.ranks is not None:
        plan = plan.limited(model.ranks.all_reduce_min(plan.num_blocks))
    for each in networks:
        each.allocate(plan.num_blocks, config.block_size)
    return plan
