"""What building kvcore does with a compiler, without one, and when it is told not to."""

import importlib.machinery
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

build_hook = pytest.importorskip("kvcore.build_hook", reason="not in the wheel")

pytestmark = pytest.mark.source_build

ROOT = Path(__file__).parents[2]
SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]

# Stands in for mypyc: an extension beside each file named, and one that they share.
WORKS = (
    "import pathlib, sys\n"
    f"for name in sys.argv[1:]: pathlib.Path(name).with_suffix({SUFFIX!r}).write_text('')\n"
    f"pathlib.Path('abc__mypyc{SUFFIX}').write_text('')\n"
)
FAILS = "print('error: no C compiler'); raise SystemExit(1)"
STOPS_HALFWAY = WORKS.replace("sys.argv[1:]", "sys.argv[2:]")


class Listener:
    """What hatchling shows its user."""

    def __init__(self):
        self.warnings = []

    def display_warning(self, message):
        self.warnings.append(message)


def hook(root, script, listener):
    made = build_hook.CompileHook(str(root), {}, None, None, str(root / "dist"), "wheel", listener)
    made.compiler = (sys.executable, "-c", script)
    made.has_compiler = lambda: True
    made.terminal = root / "terminal"
    made.terminal.touch()
    return made


def told(project):
    """What the user saw on the terminal."""
    return (project / "terminal").read_bytes().decode().replace("\r", "").splitlines()


@pytest.fixture
def project(tmp_path):
    (tmp_path / "kvcore").mkdir()
    for module in build_hook.COMPILED:
        path = tmp_path / "kvcore" / f"{module}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    return tmp_path


@pytest.fixture
def listener():
    return Listener()


@pytest.mark.parametrize(
    ("value", "version", "wanted"),
    [
        ("", "standard", True),
        ("", "editable", False),
        ("1", "standard", True),
        ("1", "editable", True),
        ("0", "standard", False),
        ("0", "editable", False),
    ],
)
def test_the_variable_and_what_is_built_decide(value, version, wanted):
    assert build_hook.is_wanted(value, version) is wanted


def test_another_value_of_the_variable_is_refused():
    with pytest.raises(ValueError, match="KVCORE_COMPILE: wanted 0, 1 or nothing, got 'yes'"):
        build_hook.is_wanted("yes", "standard")


def test_every_module_to_compile_exists():
    assert all((ROOT / "kvcore" / f"{module}.py").is_file() for module in build_hook.COMPILED)


def test_a_wheel_gets_the_compiled_modules_and_a_tag_of_its_own(project, listener, monkeypatch):
    monkeypatch.delenv(build_hook.VARIABLE, raising=False)
    data = {"force_include": {}}
    made = hook(project, WORKS, listener)
    made.initialize("standard", data)
    inside = set(data["force_include"].values())
    assert inside == {*(f"kvcore/{m}{SUFFIX}" for m in build_hook.COMPILED), f"abc__mypyc{SUFFIX}"}
    assert (data["pure_python"], data["infer_tag"]) == (False, True)
    assert all(Path(path).is_file() for path in data["force_include"])
    assert build_hook.extensions(project) == []
    made.finalize("standard", data, "")
    assert not any(Path(path).exists() for path in data["force_include"])
    assert listener.warnings == []


@pytest.mark.parametrize(
    ("script", "reason"),
    [(FAILS, "error: no C compiler"), (STOPS_HALFWAY, "1 extension modules are missing")],
)
def test_a_failed_compile_gives_a_warning_and_a_python_wheel(
    project, listener, monkeypatch, script, reason
):
    monkeypatch.delenv(build_hook.VARIABLE, raising=False)
    data = {"force_include": {}}
    hook(project, script, listener).initialize("standard", data)
    assert data == {"force_include": {}}
    assert listener.warnings == [f"kvcore is built as Python, several times slower: {reason}"]
    assert told(project)[-1] == listener.warnings[0]


def test_without_a_compiler_nothing_is_tried_or_fetched_and_the_user_hears_of_it(
    project, listener, monkeypatch
):
    monkeypatch.delenv(build_hook.VARIABLE, raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(project))
    made = hook(project, WORKS, listener)
    del made.has_compiler
    made.initialize("standard", {"force_include": {}})
    assert made.dependencies() == []
    assert listener.warnings[0].endswith("there is no C compiler (cc, gcc, clang or $CC)")
    assert told(project) == listener.warnings
    monkeypatch.setenv("CC", f"{sys.executable} -O2")
    assert made.has_compiler()


@pytest.mark.parametrize("version", ["standard", "editable"])
def test_what_is_demanded_and_cannot_be_compiled_is_an_error(
    project, listener, monkeypatch, version
):
    monkeypatch.setenv(build_hook.VARIABLE, "1")
    with pytest.raises(RuntimeError, match=r"KVCORE_COMPILE=1, .*: error: no C compiler"):
        hook(project, FAILS, listener).initialize(version, {"force_include": {}})


def test_a_long_compile_shows_how_far_it_is(project):
    lines, step = [], project / "go-on"
    waits = (
        f"import pathlib, time\nwhile not pathlib.Path({str(step)!r}).exists(): time.sleep(0.01)\n"
    )

    def tell(line):
        lines.append(line)
        work = project / "work"
        if len(lines) == 2:
            (work / "build").mkdir()
            (work / "build" / "__native.c").touch()
        if len(lines) == 3:
            (work / "build" / "__native.o").touch()
        if len(lines) == 4:
            step.touch()

    compiler = (sys.executable, "-c", waits + WORKS)
    problem = build_hook.compile_copy(project / "kvcore", project / "work", compiler, tell, 0.05)
    assert problem is None
    assert lines[0].startswith(f"kvcore: compiling {len(build_hook.COMPILED)} modules")
    stages = [line.partition(",")[0] for line in lines[1:4]]
    assert stages == ["kvcore: reading types", "kvcore: compiling C", "kvcore: linking"]


def test_a_compiler_that_is_not_there_gives_a_warning_too(project, listener, monkeypatch):
    monkeypatch.delenv(build_hook.VARIABLE, raising=False)
    made = hook(project, WORKS, listener)
    made.compiler = (str(project / "nothing"),)
    made.initialize("standard", {"force_include": {}})
    assert "No such file" in listener.warnings[0]


def test_an_editable_install_is_compiled_on_demand_and_python_again_after_the_next(
    project, listener, monkeypatch
):
    monkeypatch.setenv(build_hook.VARIABLE, "1")
    hook(project, WORKS, listener).initialize("editable", {})
    assert len(build_hook.extensions(project)) == len(build_hook.COMPILED) + 1
    monkeypatch.delenv(build_hook.VARIABLE)
    hook(project, WORKS, listener).initialize("editable", {})
    assert build_hook.extensions(project) == []


def test_what_an_earlier_build_left_is_found_and_deleted(project):
    (project / "kvcore" / f"pool{SUFFIX}").write_text("")
    (project / f"0123__mypyc{SUFFIX}").write_text("")
    build_hook.discard(project)
    assert build_hook.extensions(project) == []
    assert (project / "kvcore" / "pool.py").exists()


def test_what_the_build_needs_is_asked_for_only_when_it_compiles(project, listener, monkeypatch):
    made = hook(project, WORKS, listener)
    monkeypatch.setenv(build_hook.VARIABLE, "0")
    assert made.dependencies() == []
    monkeypatch.setenv(build_hook.VARIABLE, "1")
    assert any(name.startswith("mypy") for name in made.dependencies())


def test_the_wheel_leaves_the_build_hook_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv(build_hook.VARIABLE, "0")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        assert "kvcore/build_hook.py" not in archive.namelist()
        assert any(name.endswith("/licenses/docs/LICENSE") for name in archive.namelist())


def test_the_sdist_has_all_that_a_build_needs(tmp_path):
    (sdist,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path, filter="data")
    assert {"docs/LICENSE", "README.md", "pyproject.toml", "kvcore/build_hook.py"} <= names
    assert {name.split("/")[0] for name in names} <= {
        "docs", "README.md", "pyproject.toml", "kvcore", "PKG-INFO", ".gitignore",
    }  # fmt: skip
