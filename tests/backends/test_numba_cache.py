"""Where numba's compiled kernels are kept: a process without any folder still runs."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from backends.numba_cpu.cache_folder import private_folder

ROOT = Path(__file__).parents[2]
PROGRAM = """
import numba
from backends.numba_cpu.bits import exact, jit

for decorate in (jit, exact):
    @decorate(cache=True)
    def double(value):
        return 2 * value
    assert double(21) == 42
print(numba.config.CACHE_DIR)
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The temporary directory of this process, empty."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def run_read_only(tmp_path, temporary):
    """Run the program from a copy in which numba can write nowhere, as in a read-only install."""
    shutil.copytree(
        ROOT / "backends", tmp_path / "backends", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "program.py").write_text(PROGRAM)
    for folder in [tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())]:
        (folder / "__pycache__").touch()  # a file, so that even root makes no folder of this name
    env = os.environ | {
        "HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null", "TMPDIR": str(temporary),
        "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tmp_path),
    }  # fmt: skip
    env.pop("NUMBA_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=env, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_kernels_are_kept_in_a_private_folder_where_install_and_home_are_read_only(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    folder = Path(run_read_only(tmp_path, temporary))
    assert folder.parent == temporary
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.rglob("*.nbc"))


def test_the_folder_is_found_again(temporary):
    first = private_folder()
    assert Path(first).parent == temporary
    assert private_folder() == first


def _open(path):
    path.mkdir()
    path.chmod(0o777)


def _link(path):
    elsewhere = path.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("planted", [_open, _link, Path.touch], ids=["open", "link", "file"])
def test_what_another_user_may_have_planted_is_not_used(temporary, planted):
    path = Path(private_folder())
    path.rmdir()
    planted(path)
    assert Path(private_folder()) != path


def test_without_a_temporary_directory_nothing_is_kept(temporary):
    temporary.rmdir()
    assert private_folder() is None
