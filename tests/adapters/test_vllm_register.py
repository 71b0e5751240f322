"""Registering with a vLLM that is not as expected: one line in its log, and nothing is changed.

The vLLM here is a package of the names that the adapter imports, with the arguments that it needs.
"""

import importlib
import logging
import sys

import pytest

from kvcore.adapters.vllm import plugin

ENGINE = "kvcore.adapters.vllm.engine"
ARGUMENTS = (
    "kv_cache_config", "max_model_len", "hash_block_size", "enable_caching", "use_eagle",
    "log_stats", "enable_kv_cache_events", "dcp_world_size", "pcp_world_size", "metrics_collector",
)  # fmt: skip
NAMES = {
    "vllm.distributed.kv_events": ("AllBlocksCleared", "BlockRemoved", "BlockStored"),
    "vllm.v1.core.kv_cache_manager": ("KVCacheManager",),
    "vllm.v1.core.kv_cache_utils": ("maybe_convert_block_hash",),
    "vllm.v1.core.sched.scheduler": ("Scheduler", "KVCacheManager"),
    "vllm.v1.engine.core": ("get_request_block_hasher",),
    "vllm.v1.kv_cache_interface": ("get_kv_cache_spec_kind", "get_kv_cache_spec_sliding_window"),
    "vllm.v1.metrics.stats": ("PrefixCacheStats",),
    "vllm.v1.utils": ("tensor_data",),
}


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Put a vLLM of these names where Python looks, and import its top."""
    for name in [name for name in sys.modules if name == ENGINE or name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VLLM_PLUGINS", "other,kvcore")

    def make(version, names=NAMES, arguments=ARGUMENTS):
        classes = "class {}:\n    def __init__(self, {}): pass\n"
        manager = classes.format("KVCacheManager", ", ".join(arguments))
        for module, some in {"vllm": (), **names}.items():
            path = tmp_path.joinpath(*module.split("."), "__init__.py")
            path.parent.mkdir(parents=True, exist_ok=True)
            for folder in path.parents[: len(module.split("."))]:
                folder.joinpath("__init__.py").touch()
            text = {one: classes.format(one, "*args") for one in some}
            text |= {one: manager for one in text if one == "KVCacheManager"}
            path.write_text("".join(text.values()), encoding="utf-8")
        top = tmp_path / "vllm" / "__init__.py"
        top.write_text("" if version is None else f"__version__ = {version!r}\n", encoding="utf-8")
        importlib.invalidate_caches()
        importlib.import_module("vllm")

    yield make
    for name in [name for name in sys.modules if name == ENGINE or name.split(".")[0] == "vllm"]:
        del sys.modules[name]


def line(caplog):
    """Return the one line that the log has."""
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.exc_info is None
    said = record.getMessage()
    assert "\n" not in said
    assert said.startswith("kvcore leaves the KV cache to vLLM's own manager: ")
    return said


def imported():
    """Return the modules of vLLM that have been imported, without its top."""
    return {name for name in sys.modules if name.startswith("vllm.")}


def is_as_it_was():
    """Return True if the scheduler of this vLLM has the manager that it came with."""
    module = sys.modules.get("vllm.v1.core.sched.scheduler")
    manager = getattr(module, "KVCacheManager", None)
    return module is None or manager is None or isinstance(manager, type)


@pytest.mark.parametrize("names", ["", "other", "kvcores"])
@pytest.mark.parametrize("version", ["0.33.0", "0.99.1", None])
def test_nothing_is_imported_and_nothing_said_where_kvcore_is_not_named(
    names, version, make, monkeypatch, caplog
):
    make(version)
    monkeypatch.setenv("VLLM_PLUGINS", names)
    plugin.register()
    assert not imported()
    assert not caplog.records


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.34.0", "vLLM 0.34.0"), ("0.31.2", "vLLM 0.31.2"), ("1.0", "vLLM 1.0"),
        ("dev", "vLLM dev"), ("0.3", "vLLM 0.3"), (None, "vLLM of an unknown version"),
    ],
)  # fmt: skip
def test_another_version_is_one_line_with_those_that_are_supported(version, said, make, caplog):
    make(version)
    plugin.register()
    assert line(caplog).endswith(f"{said}; supported are 0.22, 0.32, 0.33")
    assert not imported()


@pytest.mark.parametrize("version", ["0.33.0", "0.33.1rc2+cpu", "0.32.0", "0.22.1"])
def test_a_version_that_is_as_expected_gets_kvcores_manager(version, make, caplog):
    make(version)
    plugin.register()
    plugin.register()
    made = sys.modules["vllm.v1.core.sched.scheduler"].KVCacheManager
    assert type(made.__self__).__name__ == "Plugin"
    assert not caplog.records


@pytest.mark.parametrize("module", NAMES)
def test_a_module_that_has_moved_is_one_line(module, make, caplog):
    make("0.33.4", {name: some for name, some in NAMES.items() if name != module})
    plugin.register()
    assert "in which a name has moved (No module named 'vllm." in line(caplog)
    assert is_as_it_was()


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, some in NAMES.items() for name in some]
)
def test_a_name_that_has_moved_is_one_line(module, name, make, caplog):
    names = NAMES | {module: tuple([one for one in NAMES[module] if one != name])}
    make("0.33.4", names)
    plugin.register()
    assert name in line(caplog)
    assert is_as_it_was()


@pytest.mark.parametrize("missing", ARGUMENTS)
def test_an_argument_that_has_gone_is_one_line(missing, make, caplog):
    make("0.33.4", arguments=[one for one in ARGUMENTS if one != missing])
    plugin.register()
    assert f"KVCacheManager takes no {missing}" in line(caplog)
    assert is_as_it_was()


def test_an_engine_whose_configuration_has_another_shape_keeps_its_own_manager(make, caplog):
    make("0.33.4")
    plugin.register()
    module = sys.modules["vllm.v1.core.sched.scheduler"]
    module.Scheduler(object())
    made = module.KVCacheManager(*[object() for _ in ARGUMENTS])
    assert type(made).__name__ == "KVCacheManager"
    assert "has moved" in line(caplog)
