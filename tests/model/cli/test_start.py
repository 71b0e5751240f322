"""What a start imports: packages of features that were not asked for stay on the disk."""

import gc
import re
import subprocess
import sys
import weakref

import pytest

import backends
from model.cli import start
from model.cli.imports import importing
from model.cli.options import ModelOptions
from model.control.config import EngineConfig
from model.errors import ModelNotFoundError
from model.host import uncollected

NOT_ASKED_FOR = {
    "hypothesis", "kvcore.testing", "kvcore.tiers", "kvcore.wire", "model.cluster", "msgspec",
    "nixl", "ray", "zmq",  # tiers, KV events, replicas
    "bitsandbytes", "compressed_tensors", "datasets", "gguf", "pandas", "peft", "sklearn",
    "torchvision",
    "transformers.pipelines", "transformers.trainer",  # checkpoints of other kinds
    "backends.triton_gpu", "model.compile.few_rows_kernels", "model.forward.invariant_kernels",
    "model.sample.draw_kernels", "torch._inductor.codecache", "torch._inductor.compile_fx",  # GPUs
}  # fmt: skip
A_SERVER = {"fastapi", "model.serve", "prometheus_client", "starlette", "uvicorn"}
WEB_SOCKETS = {"websockets", "wsproto"}
FOR_A_CPU = {"backends.numba_cpu", "llvmlite", "numba"}
ENGINE = ("model.cli.start",)  # all that loads a model, and no backend
RUN = ("model.run", "--prompt", "a", "--max-tokens", "1")
SERVE = ("model.serve", "--port", "0")


def imported(*flags):
    """The modules that a command has imported once it is ready, by its own report of imports."""
    command = [sys.executable, "-X", "importtime", "-m", *flags]
    names = set()
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        for line in process.stderr:
            if line.startswith("import time:"):
                names.add(line.rpartition("|")[2].strip())
            elif re.search(r"127\.0\.0\.1:\d+: ready in ", line):
                process.terminate()
    assert "torch._C" in names
    return names


@pytest.mark.parametrize(
    ("flags", "unwanted"),
    [
        (RUN, NOT_ASKED_FOR | A_SERVER | WEB_SOCKETS),
        ((*RUN, "--compile"), NOT_ASKED_FOR | A_SERVER | WEB_SOCKETS),
        (SERVE, NOT_ASKED_FOR | WEB_SOCKETS),
        (ENGINE, NOT_ASKED_FOR | A_SERVER | WEB_SOCKETS | FOR_A_CPU),
    ],
    ids=["run", "run with a trace", "serve", "an engine"],
)
def test_a_start_imports_nothing_that_it_was_not_asked_for(flags, unwanted):
    assert imported(*flags) & unwanted == set()


def test_a_start_with_host_memory_imports_the_tiers():
    assert {"kvcore.tiers", "xxhash"} <= imported(*RUN, "--host-memory", "1MiB")


def test_packages_are_imported_without_garbage_collection_and_never_collected():
    before = gc.get_freeze_count()
    try:
        with importing():
            assert not gc.isenabled()
            made = [[]]
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
        assert not any(each is made for each in gc.get_objects())
    finally:
        gc.unfreeze()


def test_garbage_is_collected_again_once_all_threads_that_pause_it_are_done():
    first, second = uncollected(), uncollected()
    with first:
        second.__enter__()
        assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
    with pytest.raises(ValueError, match="a body"), uncollected():
        raise ValueError("a body")
    assert gc.isenabled()


class Circle:
    """Garbage that only a collection finds."""

    def __init__(self):
        self.itself = self


def test_an_engine_is_made_without_garbage_collection_and_collected_before_it_serves(monkeypatch):
    seen, left, was_frozen = [], [], gc.get_freeze_count()

    def engine_of(*given, **more):
        seen.append(gc.isenabled())
        left.append(weakref.ref(Circle()))
        return make(*given, **more)

    make = start.engine_of
    monkeypatch.setattr(start, "engine_of", engine_of)
    try:
        start.make_engine(ModelOptions(), EngineConfig(num_blocks=16, eager=True))
        assert seen == [False]
        assert [each() for each in left] == [None]
        assert gc.isenabled()
        assert gc.get_freeze_count() > was_frozen
    finally:
        gc.unfreeze()


def test_a_backend_may_begin_before_weights_are_read(monkeypatch):
    events = []

    def load(*_):
        events.append("weights")
        raise ModelNotFoundError("wanted a model")

    backend = type(backends.get_backend("numba"))
    monkeypatch.setattr(backend, "warmup", lambda _, layers, **sizes: events.append(layers))
    with pytest.raises(ModelNotFoundError):
        start.start("a model", "numba", "float32", config=EngineConfig(), load=load)
    assert events == [(), "weights"]
