"""Products of one input, and what adapters add to them, in one launch each."""


def test_what_adapters_add_is_right_in_the_interpreter_and_called_once_for_each_product(
    interpreting,
):
    run = interpreting.run("-m", "tests.model.lora_check")
    calls = "2 attend_rotated, 4 expand_normed, 2 expand_parts, 2 gated"
    assert run.stdout.splitlines() == [
        "20 kinds", "found what was planted", f"qwen3: {calls}", f"qwen2: {calls}",
    ], run.stderr  # fmt: skip
