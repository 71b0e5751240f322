"""LoRA adapters of a network on two ranks: PEFT's own tokens, and all ranks add one or none."""

import json
import shutil

import pytest

from tests.model.adapters import write_adapters
from tests.model.ranks.test_ranks import Ranked

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the packages


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What `adapters_main.py` reads, and PEFT's tokens."""
    place = tmp_path_factory.mktemp("ranks")
    prompts, wanted = write_adapters(place / "rank0")
    shutil.copytree(place / "rank0" / "attention", place / "rank0" / "missing")
    shutil.copytree(place / "rank0" / "attention", place / "rank0" / "torn")
    shutil.copytree(place / "rank0", place / "rank1")
    shutil.copytree(place / "rank0" / "attention", place / "rank0" / "other")
    shutil.copytree(place / "rank1" / "all", place / "rank1" / "other")
    shutil.rmtree(place / "rank1" / "missing")
    torn = place / "rank1" / "torn" / "adapter_model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-100])
    (place / "asked.json").write_text(json.dumps({"names": [*wanted], "prompts": prompts}))
    return place, wanted


@pytest.fixture(scope="module")
def ranks(folder, forks):
    """What each rank has found."""
    ended = Ranked(forks, 2, ["-m", "tests.model.ranks.adapters_main", str(folder[0])]).end()
    assert ended.returncode == 0, ended.stderr[-4000:]
    return sorted(map(json.loads, ended.stdout.splitlines()), key=lambda one: one["rank"])


def test_two_ranks_give_the_tokens_of_peft_for_adapters_in_one_batch(folder, ranks):
    first, second = [each["mixed"] for each in ranks]
    assert first["tokens"] == [[*folder[1].values()]] * 2
    assert first["how"] == "traced"
    assert min(first["hits"], first["preemptions"]) > 0
    assert (second["hits"], second["preemptions"]) == (first["hits"], first["preemptions"])


def test_the_comparison_sees_a_part_that_is_cut_or_added_wrongly(folder, ranks):
    wanted = [*folder[1].values()]
    for found in ranks[0]["planted"].values():
        assert found[0] == wanted[0]  # without an adapter
        assert found != wanted
    assert len(ranks[0]["planted"]) == 3


def test_an_adapter_that_fails_on_one_rank_is_added_on_none_and_harms_no_request(folder, ranks):
    first, second = [each["while_running"] for each in ranks]
    said = first["found"]["said"]
    assert "rank 1 cannot add it: lora: missing: " in said["missing"]
    assert "rank 1 cannot add it: lora: torn: " in said["torn"]
    assert said["other"].endswith("lora: other: wanted the files of rank 0, got others")
    assert said["nowhere"].startswith("lora: nowhere: ")
    assert said["left"] == "()"
    assert [said[name] for name in ("sql", "again", "room")] == ["added"] * 3
    assert "1 of them until their requests have ended" in said["full"]
    wanted = folder[1]
    order = (None, "attention", "all", "attention")
    assert first["found"]["tokens"] == [wanted[name] for name in order]
    assert first["versions"] == second["versions"]
    assert [*first["versions"]] == ["sql", "more"]


def test_an_adapter_that_stays_where_it_could_be_added_is_seen(ranks):
    assert [[*each["kept"]] for each in ranks] == [["missing"], []]
