"""The three wheels say what they need, and offer what is in them."""

import re
import zipfile
from email import message_from_string

import pytest
from hatchling.builders.wheel import WheelBuilder

import kvcore
from tests.distributions import DISTRIBUTIONS, PROJECT, ROOT, bare, extra, staged

build_hook = pytest.importorskip("kvcore.build_hook", reason="not in the wheel")

VERSION = kvcore.__version__
EXTRAS = PROJECT["project"]["optional-dependencies"]
TEXT = "See [the\npage](docs/a.md#b), [a site](https://example.org/x) and [below](#c).\n"


def metadata(folder, out, kind="standard"):
    (wheel,) = WheelBuilder(str(folder)).build(directory=str(out), versions=[kind])
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        return message_from_string(archive.read(name).decode())


def required(found):
    """What a distribution requires without any extra."""
    return [line for line in found.get_all("Requires-Dist") if "extra ==" not in line]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    work = tmp_path_factory.mktemp("distributions")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCORE_COMPILE", "0")
        return {name: metadata(staged(name, VERSION, work), work / "out") for name in DISTRIBUTIONS}


@pytest.mark.parametrize(
    ("name", "extras"),
    [
        ("kvcore", {"testing", "events", "nixl"}),
        ("kvcore-kernels", {"gpu"}),
        ("kvcore-engine", {"serve", "cluster", "quantised"}),
    ],
)
def test_a_wheel_offers_the_extras_of_the_packages_that_are_in_it(wheels, name, extras):
    assert set(wheels[name].get_all("Provides-Extra")) == extras


def test_an_editable_install_offers_every_extra(tmp_path):
    found = metadata(ROOT, tmp_path, "editable")
    assert set(found.get_all("Provides-Extra")) == set(EXTRAS)


def test_an_extra_that_is_not_there_cannot_be_kept():
    there = {"run": ["torch"], "testing": ["hypothesis"]}
    with pytest.raises(ValueError, match="extras: wanted some of run, testing, got tests"):
        build_hook.keep(["testing", "tests"], there)
    assert list(there) == ["run", "testing"]


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("kvcore", []),
        ("kvcore-kernels", ["kvcore"]),
        ("kvcore-engine", ["kvcore", "kvcore-kernels"]),
    ],
)
def test_a_wheel_requires_the_others_in_its_version(wheels, name, others):
    ours = [line for line in required(wheels[name]) if line.startswith("kvcore")]
    assert set(ours) == {f"{other}=={VERSION}" for other in others}


def test_the_wheels_refuse_a_torch_that_was_not_tried(wheels):
    for name in ("kvcore-kernels", "kvcore-engine"):
        (torch,) = [line for line in required(wheels[name]) if bare(line) == "torch"]
        assert "<" in torch
    everywhere = {line for part in EXTRAS for line in extra(part) if bare(line) == "torch"}
    assert len({line for line in everywhere if "==" not in line}) == 1


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_long_description_has_no_link_that_a_package_index_cannot_follow(wheels, name):
    links = re.findall(r"\]\(([^)]*)\)", wheels[name].get_payload())
    assert all("://" in link or link.startswith("#") for link in links)
    assert wheels[name]["Description-Content-Type"] == "text/markdown"


@pytest.mark.parametrize(
    ("source", "page"),
    [
        ("", "the\npage"),
        ("https://example.org/tree", "[the\npage](https://example.org/tree/docs/a.md#b)"),
        ("https://example.org/tree/", "[the\npage](https://example.org/tree/docs/a.md#b)"),
    ],
)
def test_links_become_absolute_once_the_project_has_a_url(tmp_path, source, page):
    (tmp_path / "README.md").write_text(f"# A\n\n![a picture](docs/a.png)\n\n{TEXT}")
    table = {"urls": {"Source": source}} if source else {}
    build_hook.LongDescriptionHook(str(tmp_path), {}).update(table)
    rest = "[a site](https://example.org/x) and [below](#c)"
    assert table["readme"]["text"] == f"# A\n\nSee {page}, {rest}.\n"
