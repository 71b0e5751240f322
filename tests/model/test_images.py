"""Images in prompts: what `generate` says, whatever is cached, cut, preempted or drafted."""

import dataclasses
import io
import json
import struct
import zlib

import pytest
import torch
from PIL import Image, PngImagePlugin

import backends
from model import LLM, SamplingParams
from model.attention.ahead import Ahead
from model.cli.prompts import read_command_line
from model.cli.session import execute
from model.control.config import EngineConfig
from model.engine import Engine
from model.errors import InvalidArgumentError
from model.forward.image_encoder import ImageEncoder
from model.load.images import ImageCodec, NoImages, digest, open_image
from model.load.loader import load_model
from tests.model import vision

QUICK = ["Qwen3VLConfig", "Gemma3Config", "Idefics3Config"]
CPU = backends.get_backend("numba").device
LIMITS = EngineConfig()
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level("ERROR")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QUICK)
def test_images_give_the_tokens_of_generate(name):
    assert vision.outcome(name) == vision.stored()[name] == "equal"


@pytest.mark.walk
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in vision.FAMILIES if name not in QUICK])
def test_every_other_family_does_what_the_walk_has_found(name):
    if name == "SmolVLMConfig":
        pytest.importorskip("num2words")
    assert vision.outcome(name) == vision.stored()[name]


class OtherRank:
    """A rank on which the tower fails for the second request of a step."""

    def all_gather(self, own):
        return [own, bytes([number == 1 for number in range(len(own))])]


@pytest.mark.filterwarnings("ignore")
def test_a_request_whose_image_fails_on_another_rank_ends_on_this_one_too():
    model, _ = vision.build("Qwen3VLConfig")
    engine = Engine(model, backends.get_backend("numba"), EngineConfig(block_size=4))
    engine.images._ranks = OtherRank()
    requests = [vision.submit(engine, vision.PROMPTS[number], GREEDY) for number in (0, 1)]
    engine.step()
    assert [request.is_finished for request in requests] == [False, True]
    assert "failed on another rank" in str(requests[1].error)


# Planted: what the walk must see.


@pytest.mark.filterwarnings("ignore")
def test_the_walk_sees_blocks_that_do_not_know_their_image(monkeypatch):
    """Image identity left out: the second image hits the blocks of the first."""
    encode = ImageCodec.encode

    def anonymous(self, *args, **how):
        tokens, prompt = encode(self, *args, **how)
        items = tuple(dataclasses.replace(item, content=b"an image") for item in prompt.items)
        return tokens, dataclasses.replace(prompt, items=items)

    monkeypatch.setattr(ImageCodec, "encode", anonymous)
    assert vision.outcome("LlavaConfig").startswith("WRONG: ")


@pytest.mark.filterwarnings("ignore")
def test_the_walk_sees_generated_tokens_without_the_constant_of_their_positions(monkeypatch):
    encode = ImageCodec.encode

    def unmoved(self, *args, **how):
        tokens, prompt = encode(self, *args, **how)
        return tokens, dataclasses.replace(prompt, delta=0)

    monkeypatch.setattr(ImageCodec, "encode", unmoved)
    assert vision.outcome("Qwen3VLConfig").startswith("WRONG: ")


@pytest.mark.filterwarnings("ignore")
def test_the_walk_sees_deeper_layers_that_get_nothing_of_an_image(monkeypatch):
    run = ImageEncoder._run

    def shallow(self, inputs):
        encoded = run(self, inputs)
        return dataclasses.replace(encoded, deeper=tuple(map(torch.zeros_like, encoded.deeper)))

    monkeypatch.setattr(ImageEncoder, "_run", shallow)
    assert vision.outcome("Qwen3VLConfig").startswith("WRONG: ")


@pytest.mark.filterwarnings("ignore")
def test_the_walk_sees_tokens_of_an_image_that_do_not_see_each_other(monkeypatch):
    monkeypatch.setattr(Ahead, "attend", lambda *_: None)
    assert vision.outcome("Gemma3Config").startswith("WRONG: ")


def test_an_image_whose_tokens_see_each_other_has_to_fit_into_a_step_and_a_window():
    model, _ = vision.build("Gemma3Config")
    for sizes, says in (
        ({"max_num_batched_tokens": 8, "max_num_seqs": 5}, "at most 3 tokens of one, which one"),
        ({"params": SamplingParams(prompt_logprobs=0)}, "prompt_logprobs cannot be combined"),
    ):
        params = sizes.pop("params", GREEDY)
        engine = vision.engine_of(model, num_blocks=90, **sizes)
        with pytest.raises(InvalidArgumentError, match=says):
            vision.submit(engine, vision.PROMPTS[0], params)


# A checkpoint, as users have it.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("vision")
    vision.save("Qwen2_5_VLConfig", path)
    return path


@pytest.fixture(scope="module")
def files(folder):
    paths = []
    for number, one in enumerate((vision.FIRST, vision.SECOND)):
        paths.append(folder / f"{number}.png")
        one.save(paths[-1])
    return paths


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), num_blocks=100, block_size=4)


def test_a_checkpoint_takes_images_in_the_shape_of_vllm(llm, files):
    mark = llm.engine.model.images.mark
    asked = {"prompt": f"Who is {mark}?", "multi_modal_data": {"image": vision.FIRST}}
    (once,) = llm.generate(asked, GREEDY, use_tqdm=False)
    assert once.prompt == asked["prompt"]
    assert once.num_cached_tokens == 0
    runs = llm.engine.images.num_runs
    for image in (files[0], str(files[0]), files[0].read_bytes()):
        again = asked | {"multi_modal_data": {"image": [image]}}
        (found,) = llm.generate([again], GREEDY, use_tqdm=False)
        assert found.outputs == once.outputs
        assert found.num_cached_tokens == len(found.prompt_token_ids) // 4 * 4
    assert llm.engine.images.num_runs == runs
    (other,) = llm.generate(
        asked | {"multi_modal_data": {"image": vision.SECOND}}, GREEDY, use_tqdm=False
    )
    assert other.num_cached_tokens == len("Who is ") // 4 * 4


def test_a_prompt_without_marks_has_its_images_at_its_start(llm):
    mark = llm.engine.model.images.mark
    tokens = [
        llm.engine.model.images.encode(text, [vision.FIRST], LIMITS)[0]
        for text in ("Who?", f"{mark}\nWho?")
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"prompt": "a", "multi_modal_data": {"audio": b""}}, "image alone in multi_modal_data"),
        ({"prompt": "a", "images": []}, "prompts: wanted .*, got images"),
        ({"multi_modal_data": {"image": []}}, "prompts: wanted a text"),
        ({"prompt": "a", "multi_modal_data": {"image": b"no image"}}, "wanted one of PNG"),
        ({"prompt": "a", "multi_modal_data": {"image": "/nowhere"}}, "cannot read '/nowhere'"),
        ({"prompt": "a", "multi_modal_data": {"image": 7}}, "got int"),
    ],
)
def test_wrong_prompts_with_images_are_refused_by_name(llm, asked, says):
    with pytest.raises(InvalidArgumentError, match=says):
        llm.generate([asked], GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished


def test_a_text_needs_one_mark_for_each_image(llm):
    mark = llm.engine.model.images.mark
    asked = {"prompt": f"{mark} {mark}", "multi_modal_data": {"image": vision.FIRST}}
    with pytest.raises(
        InvalidArgumentError, match="once for each image, where it stands: 1, got 2"
    ):
        llm.generate(asked, GREEDY, use_tqdm=False)


def test_images_that_a_class_cannot_place_are_refused(llm):
    mark = llm.engine.model.images.mark
    asked = {"prompt": 2 * mark, "multi_modal_data": {"image": [vision.FIRST, vision.SECOND]}}
    with pytest.raises(InvalidArgumentError, match="such as with text between them"):
        llm.generate(asked, GREEDY, use_tqdm=False)


def test_an_image_for_a_model_of_text_is_refused():
    llm = LLM("model/tiny", num_blocks=8)
    asked = {"prompt": "a", "multi_modal_data": {"image": vision.FIRST}}
    with pytest.raises(InvalidArgumentError, match="image: 'model/tiny' reads text alone"):
        llm.generate(asked, GREEDY, use_tqdm=False)


def test_a_checkpoint_without_a_processor_serves_text_and_says_why_no_images(folder, tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    model = load_model(str(tmp_path), CPU)
    assert isinstance(model.images, NoImages)
    with pytest.raises(InvalidArgumentError, match=r"image: the processor of .* does not load"):
        model.images.encode("a", [vision.FIRST], LIMITS)


# Files.


def saved(image, kind="PNG", **how):
    out = io.BytesIO()
    image.save(out, kind, **how)
    return out.getvalue()


def limits(**changes):
    return dataclasses.replace(LIMITS, **changes)


def test_an_image_is_turned_as_its_file_says_and_has_no_transparency():
    turned = Image.new("RGB", (4, 2), "red")
    exif = turned.getexif()
    exif[0x0112] = 6
    assert open_image(saved(turned, "JPEG", exif=exif), LIMITS).size == (2, 4)
    assert open_image(saved(Image.new("RGBA", (4, 2))), LIMITS).mode == "RGB"


def test_sizes_are_refused_before_anything_is_decoded(monkeypatch):
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", lambda self: pytest.fail("decoded"))
    data = saved(Image.new("1", (4000, 3000)))
    with pytest.raises(InvalidArgumentError, match=r"1,000 pixels \(--max-image-pixels\), got 4"):
        open_image(data, limits(max_image_pixels=1000))
    with pytest.raises(InvalidArgumentError, match=r"100 bytes \(--max-image-bytes\)"):
        open_image(data, limits(max_image_bytes=100))


def test_a_bomb_and_a_broken_file_are_one_line_each():
    header = b"IHDR" + struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    bomb = saved(vision.FIRST)
    bomb = bomb[:12] + header + struct.pack(">I", zlib.crc32(header)) + bomb[33:]
    with pytest.raises(InvalidArgumentError) as error:
        open_image(bomb, LIMITS)
    assert "\n" not in str(error.value)
    with pytest.raises(InvalidArgumentError, match="its file is broken"):
        open_image(saved(vision.FIRST)[:2000], LIMITS)
    with pytest.raises(InvalidArgumentError, match="wanted one of PNG"):
        open_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", LIMITS)


def test_the_identity_of_an_image_is_all_that_its_tower_takes():
    one = {"pixel_values": torch.arange(6.0).view(2, 3), "grid": torch.tensor([1, 2])}
    same = {name: tensor.clone() for name, tensor in reversed(one.items())}
    assert digest(one) == digest(same)
    for other in (
        one | {"grid": torch.tensor([2, 1])},
        one | {"pixel_values": one["pixel_values"].view(3, 2)},
        one | {"pixel_values": one["pixel_values"].to(torch.int32).view(torch.float32)},
        {"pixel_values": one["pixel_values"]},
    ):
        assert digest(other) != digest(one)


# The tower.


def test_outputs_are_kept_as_far_as_their_bound_and_a_tower_that_fails_ends_one_request():
    model, _ = vision.build("LlavaConfig")
    engine = vision.engine_of(model, num_blocks=90, encoder_cache_bytes=0)
    alone = [vision.submit(engine, asked) for asked in vision.PROMPTS[:2]]
    while engine.has_unfinished:
        engine.step()
    assert not engine.images._kept
    run = engine.images._run

    def fails(inputs):
        if torch.equal(inputs["pixel_values"], broken):
            raise RuntimeError("out of memory\nmuch more")
        return run(inputs)

    broken = alone[1].images.inputs[0]["pixel_values"]
    engine = vision.engine_of(model, num_blocks=90)
    engine.images._run = fails
    run = engine.images.__class__._run.__get__(engine.images)
    again = [vision.submit(engine, asked) for asked in vision.PROMPTS[:2]]
    while engine.has_unfinished:
        engine.step()
    assert again[0].output_tokens == alone[0].output_tokens
    assert again[1].finish_reason.value == "error"
    assert str(again[1].error) == "image: the vision tower failed: out of memory"
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks


# The command line.


def test_a_run_takes_images_and_verifies_them(folder, files, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    entry = {"prompt": "What differs?", "images": [str(path) for path in files]}
    prompts.write_text(json.dumps(entry))
    common = ["--model", str(folder), "--verify", "--max-tokens", "4", "--json"]
    for own in (
        ["--prompt", "Who?", "--image", str(files[0])],
        ["--prompts-file", str(prompts)],
    ):
        assert execute(*read_command_line([*common, *own])) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["verified"] is True
        assert not document["mismatches"]
