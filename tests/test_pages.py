"""The project's pages are true: their links, commands and examples, and the words people search."""

import doctest
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.architecture import PACKAGES
from tests.kvcore.hunts import figures
from tests.kvcore.tiers.planted import PLANTED, UNAIDED

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / ".github").glob("*.md")),
    *sorted(page for page in DOCS.rglob("*.md") if "_generated" not in page.parts),
    *sorted(page for package in PACKAGES for page in (ROOT / package).rglob("README.md")),
]
WORDS = {page: len(page.read_text(encoding="utf-8").split()) for page in PAGES}
SITE = {page: count for page, count in WORDS.items() if page.is_relative_to(DOCS)}
TERMS = (
    "speculative decoding", "prefix caching", "chunked prefill", "tensor parallelism",
    "structured outputs", "preemption", "KV events", "disaggregated prefill", "CUDA graphs", "LoRA",
)  # fmt: skip
CAPABILITIES = {
    "groups": ["FullAttention(block_size=8)", "SlidingWindow(", "ChunkedLocal("],
    "fork, copy on write, truncate": [".fork(", "CopyOrder(", ".truncate("],
    "drafts": [".extend(", ".commit(seq, 2)"],
    "leases": [".lease(", "max_steps=", ".leases.end(", ".fail_load(", "num_deferred_blocks"],
    "planning": [".plan(", "fits_above("],
    "retention": ["Retention(", '"pin"', ".tick("],
    "identity": [
        "Namespace(salt=",
        "lora_version=",
        "MultimodalItem(",
        "namespace=None",
        ".reset()",
    ],
    "events and snapshot": ["BlocksRemoved", "AllCleared", ".snapshot()", "fold("],
    "statistics": [".stats()", "resumed=True", "num_slots", ".lifetimes."],
    "step batch": ["StepTables(", ".write_step(", "row_stride="],
    "whole step": [".step(", "num_known=", "num_expected=", "num_reserved="],
    "known later": [".expect(", ".resolve(", ".resolve_step(", "start="],
    "determinism": ["ranks"],
}


def name(page):
    return page.relative_to(ROOT).as_posix()


def sessions(page):
    return "\n".join(
        re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    )


WITH_EXAMPLES = [page for page in PAGES if ">>> " in sessions(page)]
EXAMPLES = "\n".join(sessions(page) for page in WITH_EXAMPLES)


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name)
def test_every_example_of_a_page_prints_what_it_shows(page):
    test = doctest.DocTestParser().get_doctest(sessions(page), {}, page.stem, page.name, 0)
    report = []
    runner = doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert runner.run(test, out=report.append).failed == 0, "".join(report)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_capability_has_an_example(capability):
    for call in CAPABILITIES[capability]:
        assert call in EXAMPLES, call


def test_the_gate_finds_the_readmes_two_commands():
    assert re.findall(r"^pip install .* && python -m model\.run$", README, re.MULTILINE)
    assert re.findall(r"^pip install .* && pytest$", README, re.MULTILINE)


@pytest.mark.parametrize(("profile", "is_fixed"), [("default", True), ("search", False)])
def test_pytest_tries_the_same_examples_each_time_unless_told_to_search(profile, is_fixed):
    chosen = settings.get_profile(profile)
    assert chosen.derandomize == is_fixed
    page = (DOCS / "explanation" / "how-we-test.md").read_text(encoding="utf-8")
    assert f"--hypothesis-profile={profile}" in page or is_fixed
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


def test_the_pages_count_the_planted_bugs_and_how_they_are_hunted():
    page = (DOCS / "explanation" / "how-we-test.md").read_text(encoding="utf-8")
    for text in (README, page):
        assert figures().sentence() in " ".join(text.split())
    assert f"{figures().within} of the first must" in " ".join(page.split())
    tiers = (DOCS / "how-to" / "tiers.md").read_text(encoding="utf-8")
    assert f"{len(PLANTED) + len(UNAIDED)} planted bugs" in tiers


@pytest.mark.parametrize("term", TERMS)
def test_one_grep_finds_a_term_in_the_readme_and_in_the_pages(term):
    assert term.lower() in README.lower()
    site = " ".join(page.read_text(encoding="utf-8") for page in SITE).lower()
    assert term.lower() in " ".join(site.split())


@pytest.mark.parametrize("page", SITE, ids=name)
def test_a_page_stays_short(page):
    assert WORDS[page] <= 2500


def test_all_pages_together_stay_short():
    assert sum(SITE.values()) + WORDS[ROOT / "README.md"] <= 38_300


@pytest.mark.parametrize("path", sorted((DOCS / "data").glob("*.json")), ids=name)
def test_a_measured_result_has_its_machine_date_and_command(path):
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["machine"]
    assert found["date"]
    for part in found["parts"]:
        assert part["command"], part["title"]
        assert {len(row) for row in part["rows"]} == {len(part["columns"])}, part["title"]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_pages_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target and "_generated/" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_files_that_a_page_names_exist(page):
    pattern = r"`((?:kvcore|backends|model|tests|docs)/[\w/.-]+)`"
    for named in re.findall(pattern, page.read_text(encoding="utf-8")):
        assert (ROOT / named).exists(), named


def test_the_life_of_a_request_names_functions_that_exist():
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    places = re.findall(r"([\w/]+\.py):(\w+(?:, \w+)*)", page)
    assert len(places) >= 10
    for path, functions in places:
        source = (ROOT / path).read_text(encoding="utf-8")
        for function in functions.split(", "):
            assert re.search(rf"def {function}\b", source), f"{path}:{function}"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_file_that_a_source_names_is_there(package):
    there = [str(path) for folder in (package, "tests") for path in (ROOT / folder).rglob("*.py")]
    for path in (ROOT / package).rglob("*.py"):
        for named in re.findall(r"`([\w/]+\.py)`", path.read_text(encoding="utf-8")):
            is_there = any(one.endswith(f"/{named}") for one in there)
            assert is_there, f"{path.relative_to(ROOT)} names {named}"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_has_a_short_readme_that_names_its_files(package):
    for folder in {path.parent for path in (ROOT / package).rglob("*.py")}:
        page = (folder / "README.md").read_text(encoding="utf-8")
        assert 8 <= len(page.splitlines()) <= 16, folder
        for named in re.findall(r"^- `([^`]+)`", page, re.MULTILINE):
            for each in named.split(", "):
                assert list(folder.glob(each.rstrip("/"))), f"{folder}: {each}"
