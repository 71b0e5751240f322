"""What is shipped and what an import costs: kvcore alone, typed, light."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import kvcore

ROOT = Path(__file__).parents[2]


@pytest.mark.source_build
def test_the_wheel_holds_kvcore_alone_and_its_types(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCORE_COMPILE", "0")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(f"kvcore-{kvcore.__version__}.dist-info/METADATA").decode()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"kvcore", f"kvcore-{kvcore.__version__}.dist-info"}
    assert "kvcore/py.typed" in names
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "kvcore").rglob("*.py")}
    sources.remove("kvcore/build_hook.py")
    assert sources <= set(names)
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    assert [line for line in required if "extra ==" not in line] == ["Requires-Dist: xxhash>=3.4"]


def test_importing_kvcore_loads_the_standard_library_and_xxhash_only():
    script = (
        "import sys; before = set(sys.modules); import kvcore;"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    result = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {script}"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(result.stdout.split())
    assert "kvcore" in loaded
    ours = {name for name in loaded if name == "kvcore" or name.endswith("__mypyc")}
    assert loaded - set(sys.stdlib_module_names) - ours <= {"xxhash", "_xxhash"}


def test_importing_kvcore_takes_under_30_ms_of_the_processor():
    """Beyond the interpreter, which has started when the clock does; the best of a few runs.

    Where what kvcore imports takes 12 ms, 30 ms are two and a half times that. A processor that is
    slower at the moment has two and a half times what these imports take there, measured directly
    before.
    """
    times = []
    for _ in range(15):
        needed = seconds_to("import dataclasses, hashlib, typing, xxhash")
        times.append((seconds_to("import kvcore"), needed))
        if any(taken < max(0.030, 2.5 * needed) for taken, needed in times):
            break
    else:
        pytest.fail(f"seconds for kvcore, and for what it imports: {times}")


def seconds_to(statement):
    """Processor time of a statement in a fresh interpreter."""
    clock = f"begun = time.process_time(); {statement}; print(time.process_time() - begun)"
    script = f"import sys; sys.path[:0] = {sys.path!r}; import time; {clock}"
    command = [sys.executable, "-I", "-c", script]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
