"""A trace on disk is read by a second start, and by no network that differs."""

import os
import stat
import time
from pathlib import Path

import pytest
import torch

from model.compile import stored_graphs
from model.compile import traced_network as tracing
from model.compile.stored_graphs import cache_dir, digest
from model.compile.traced_network import trace_network
from tests.model.compile.test_piecewise import inputs
from tests.model.compile.test_traced_network import CPU, Telling, switched
from tests.model.networks import CONFIGS, build
from tests.model.recurrent_networks import KINDS, engine_of


def same_bits(one, other):
    """Whether two traced networks give the same logits."""
    with torch.no_grad():
        return torch.equal(*(each.logits(*inputs(9, [0, 4]), Telling()) for each in (one, other)))


TRACED = [name for name in CONFIGS if name != "gpt_oss"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCORE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "traces"


def traces_of(monkeypatch):
    """Counts how often a network is traced from now on."""
    made, trace = [], tracing._trace
    monkeypatch.setattr(tracing, "_trace", lambda *given: made.append(0) or trace(*given))
    return made


@pytest.mark.parametrize("architecture", TRACED)
def test_a_second_start_traces_nothing_and_gets_the_same_graph(architecture, monkeypatch):
    first = trace_network(switched(build(architecture, 3)), CPU, is_stored=True)
    made = traces_of(monkeypatch)
    network = switched(build(architecture, 4))  # other weights of the same kind
    second = trace_network(network, CPU, is_stored=True)
    assert not made
    assert second.module.code == first.module.code
    assert second.terms == first.terms
    for one, other in zip(first.module.graph.nodes, second.module.graph.nodes, strict=True):
        assert one.meta.get("sized", {}) == other.meta["sized"]
        if isinstance(seen := one.meta.get("val"), torch.Tensor):
            assert stored_graphs._look(seen) == stored_graphs._look(other.meta["val"])
    assert same_bits(second, trace_network(network, CPU))
    assert len(made) == 1
    assert {type(value) for value in second.module.parameters()} == {torch.nn.Parameter}


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_stored_trace_calls_modules_with_states(kind, monkeypatch):
    first = engine_of(kind).network
    first.trace()
    made = traces_of(monkeypatch)
    second = engine_of(kind).network
    second.trace()
    assert not made
    assert second._traced[False].module.code == first._traced[False].module.code
    assert len(second._traced[False].recurrent) == len(first._traced[False].recurrent) > 0
    for one, other in zip(
        first._traced[False].recurrent, second._traced[False].recurrent, strict=True
    ):
        assert one == other


def _rotated_slower(network, monkeypatch):
    network.config.rope_parameters["rope_theta"] *= 2


def _shorter(network, monkeypatch):
    del network.model.layers[1]


def _halved(network, monkeypatch):
    network.to(torch.bfloat16)


def _rescaled(network, monkeypatch):
    network.model.layers[0].self_attn.scaling *= 2


def _tied(network, monkeypatch):
    network.lm_head.weight = network.model.embed_tokens.weight


def _newer(network, monkeypatch):
    monkeypatch.setattr(stored_graphs.transformers, "__version__", "9.9")


def _replaced(network, monkeypatch):
    layer = network.model.layers[0].mlp
    layer.forward = lambda x: x


def _edited(network, monkeypatch):
    read = Path.read_bytes
    edited = lambda path: read(path) + b"#" * (path.name == "traced_network.py")  # noqa: E731
    monkeypatch.setattr(Path, "read_bytes", edited)


def _edited_there(network, monkeypatch):
    read = Path.read_bytes
    edited = lambda path: read(path) + b"#" * (path.name == "modeling_qwen3.py")  # noqa: E731
    monkeypatch.setattr(Path, "read_bytes", edited)


@pytest.mark.parametrize(
    "change",
    [
        _rotated_slower, _shorter, _halved, _rescaled, _tied, _newer, _replaced, _edited,
        _edited_there,
    ],
)  # fmt: skip
def test_whatever_a_trace_depends_on_changes_its_name(change, monkeypatch):
    network = switched(build("qwen3", 3))
    before = digest(network)
    assert digest(switched(build("qwen3", 4))) == before
    change(network, monkeypatch)
    assert digest(network) != before


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _cut(path):
    path.write_bytes(path.read_bytes()[:100])


def _empty(path):
    path.write_bytes(b"")


def _open_to_all(path):
    path.chmod(0o666)


def _of_another(path):
    """A whole file of another network, under this name."""
    network = switched(build("llama", 3))
    trace_network(network, CPU, is_stored=True)
    other = path.with_name(digest(network))
    stored_graphs.write_file(path, stored_graphs.read_file(other))
    other.unlink()


def _altered(path):
    """A whole file whose operations are others."""
    content = stored_graphs.read_file(path)
    assert b'"torch:rsqrt"' in content
    stored_graphs.write_file(path, content.replace(b'"torch:rsqrt"', b'"torch:sin"'))


def test_files_that_no_start_has_read_for_long_are_deleted(folder):
    old, used, new = (folder / name for name in ("old", "used", "new"))
    long_ago = time.time() - 61 * 24 * 3600
    for path in (old, used):
        stored_graphs.write_file(path, b"x")
        os.utime(path, (long_ago, long_ago))
    assert stored_graphs.read_file(used) == b"x"
    stored_graphs.write_file(new, b"x")
    assert {*folder.iterdir()} == {used, new}


@pytest.mark.parametrize("damage", [_flip, _cut, _empty, _open_to_all, _of_another, _altered])
def test_a_corrupt_or_foreign_file_is_traced_anew_and_replaced(damage, folder, monkeypatch):
    network = switched(build("qwen3", 3))
    trace_network(network, CPU, is_stored=True)
    [path] = folder.iterdir()
    whole = path.read_bytes()
    damage(path)
    made = traces_of(monkeypatch)
    again = trace_network(network, CPU, is_stored=True)
    assert len(made) == 1
    assert same_bits(again, trace_network(network, CPU))
    assert path.read_bytes() == whole


def test_a_file_of_another_user_is_a_miss(folder, monkeypatch):
    network = switched(build("qwen3", 3))
    trace_network(network, CPU, is_stored=True)
    made, user = traces_of(monkeypatch), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    trace_network(network, CPU, is_stored=True)
    assert len(made) == 1


def test_a_file_is_for_its_owner_alone_and_there_is_never_half_of_one(folder, monkeypatch):
    network = switched(build("qwen3", 3))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
        trace_network(network, CPU, is_stored=True)
        assert [*folder.iterdir()] == []
    trace_network(network, CPU, is_stored=True)
    [path] = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_made_costs_the_cache_and_nothing_else(folder):
    folder.parent.mkdir()
    folder.write_text("a file")
    trace_network(switched(build("qwen3", 3)), CPU, is_stored=True)


def test_the_folder_is_the_users_cache_unless_a_variable_names_one(monkeypatch, tmp_path):
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("KVCORE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/kvcore")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "kvcore"
