"""The project's pages are true: their links, commands, examples and numbers."""

import doctest
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import kernels_picture
from tests.architecture import PACKAGES
from tests.kvcore.sabotage import SABOTAGES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TESTING = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_readmes_session_prints_what_it_shows():
    (session,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    test = doctest.DocTestParser().get_doctest(session, {}, "README", "README.md", 0)
    assert len(test.examples) == 8
    report = []
    result = doctest.DocTestRunner().run(test, out=report.append)
    assert result.failed == 0, "".join(report)


def test_every_example_of_the_page_on_the_api_prints_what_it_shows():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    session = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    test = doctest.DocTestParser().get_doctest(session, {}, "api", "api.md", 0)
    report = []
    result = doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL).run(
        test, out=report.append
    )
    assert result.failed == 0, "".join(report)
    assert result.attempted > 50


def test_every_example_of_the_page_on_testing_yours_prints_what_it_shows():
    page = (ROOT / "docs" / "testing-yours.md").read_text(encoding="utf-8")
    session = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    test = doctest.DocTestParser().get_doctest(session, {}, "yours", "testing-yours.md", 0)
    report = []
    result = doctest.DocTestRunner().run(test, out=report.append)
    assert result.failed == 0, "".join(report)
    assert result.attempted > 12


def test_every_example_of_the_page_on_transfers_prints_what_it_shows():
    page = (ROOT / "docs" / "transfer.md").read_text(encoding="utf-8")
    session = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    test = doctest.DocTestParser().get_doctest(session, {}, "transfer", "transfer.md", 0)
    report = []
    result = doctest.DocTestRunner().run(test, out=report.append)
    assert result.failed == 0, "".join(report)
    assert result.attempted > 15


def test_the_gate_finds_the_readmes_two_commands():
    assert re.findall(r"^pip install .* && python -m model\.run$", README, re.MULTILINE)
    assert re.findall(r"^pip install .* && pytest$", README, re.MULTILINE)


@pytest.mark.parametrize(("profile", "is_fixed"), [("default", True), ("search", False)])
def test_pytest_tries_the_same_examples_each_time_unless_told_to_search(profile, is_fixed):
    chosen = settings.get_profile(profile)
    assert chosen.derandomize == is_fixed
    assert f"--hypothesis-profile={profile}" in TESTING or is_fixed
    tried = []

    @settings(chosen)
    @given(numbers=st.lists(st.integers()))
    def note(numbers):
        tried.append(numbers)

    note()
    first = [*tried]
    tried.clear()
    if is_fixed:  # else a seed may have been given
        note()
        assert tried == first


def test_the_readme_counts_the_planted_bugs():
    assert f"{len(SABOTAGES)} planted bugs" in README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_pages_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_that_a_page_names_exist(page):
    pattern = r"`((?:kvcore|backends|model|tests|docs)/[\w/.]+\.(?:py|md))`"
    for name in re.findall(pattern, page.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("package", PACKAGES)
def test_a_file_that_a_source_names_is_there(package):
    there = [str(path) for folder in (package, "tests") for path in (ROOT / folder).rglob("*.py")]
    for path in (ROOT / package).rglob("*.py"):
        for name in re.findall(r"`([\w/]+\.py)`", path.read_text(encoding="utf-8")):
            is_there = any(one.endswith(f"/{name}") for one in there)
            assert is_there, f"{path.relative_to(ROOT)} names {name}"


def test_the_picture_of_the_kernels_is_drawn_from_their_page():
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert len(kernels_picture.decode_rows(page)) >= 10
    drawn = (ROOT / "docs" / "kernels.svg").read_text(encoding="utf-8")
    assert drawn == kernels_picture.picture(page), "run python -m tests.kernels_picture"
