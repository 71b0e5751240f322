"""A user's program is clean under strict type checkers, with nothing of ours but the wheel's files.

`python -m tests.kvcore.test_types` runs pyright over it as well (`pip install pyright`).
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kvcore import typed_user

USER = Path(typed_user.__file__)
PYRIGHT = '{"typeCheckingMode": "strict", "pythonVersion": "3.11"}'


def run(*command, cwd):
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def copied(folder):
    shutil.copy(USER, folder / "program.py")
    (folder / "kvcore").symlink_to(USER.parents[2] / "kvcore")
    return folder


def test_a_users_program_runs():
    typed_user.main()


@pytest.mark.source_build
def test_mypy_finds_nothing_in_a_users_program(tmp_path):
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
    # The cache lasts from run to run: it is the types of kvcore that take the time.
    cache = USER.parents[2] / ".mypy_cache" / "user"
    done = run(*command, f"--cache-dir={cache}", "program.py", cwd=copied(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.source_build
def test_mypy_finds_a_mistake_in_a_users_program(tmp_path):
    pytest.importorskip("mypy")
    folder = copied(tmp_path)
    with (folder / "program.py").open("a", encoding="utf-8") as program:
        program.write('kvcore.KVCacheManager("64", 4).open("tokens").num_tokens = 3\n')
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
    cache = USER.parents[2] / ".mypy_cache" / "user"
    done = run(*command, f"--cache-dir={cache}", "program.py", cwd=folder)
    assert done.returncode == 1
    assert "[arg-type]" in done.stdout


def test_pyright_finds_nothing_in_a_users_program(tmp_path):
    if shutil.which("pyright") is None:
        pytest.skip("pyright is not installed: pip install pyright")
    (copied(tmp_path) / "pyrightconfig.json").write_text(PYRIGHT, encoding="utf-8")
    done = run("pyright", "program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
