"""What of the client suite does not apply to vLLM 0.32's server, each with the reason.

The same tests come out so with vLLM's own cache manager (`vllm_suite.py --plain`).
"""

import re

_NO_GUIDE = (
    "/v1/messages takes no structured outputs, so the tiny model cannot be told what to write"
)
_READING = "its parser reads what is no call, and white space, in another way"
_REASONING = "run without a reasoning parser: vLLM's take a text without tags for reasoning"
_SPACE = "its grammar of calls allows endless white space, which the tiny model writes"
_LENIENT = "it is ignored, or answered, there"
LACKS = {
    r"openai_client::test_what_a_request_wants_kept": "there is no `retain`",
    r".*expression_choice_or_grammar\[guide[01]": "`guided_*` is now `structured_outputs`",
    r".*expression_choice_or_grammar\[guide5": "`json_object` false counts as a second form",
    r".*a_form_that_means_nothing_is_named\[guide[01235]-": "`guided_*` is ignored",
    r".*a_form_that_means_nothing_is_named\[guide9-": "`guided_*` is ignored",
    r".*a_wrong_field_is_named\[.*(logit_bias|best_of)": _LENIENT,
    r".*a_wrong_field_is_named\[True-wrong1[14]-": "a stream begins before it is refused",
    r".*a_wrong_field_of_a_chat_is_named\[wrong1-": "any role is taken",
    r"messages::test_(a_text_is|reasoning_text|the_events|a_stop_seq|the_last_message)": _NO_GUIDE,
    r"agents::test_(an_error_in.*messages|an_answer_of_messages)": _NO_GUIDE,
    r"messages::test_a_conversation_with_results": "it drops white space and reasoning",
    r"messages::test_what_is_not_done.*(tool_choice|n)\]": _LENIENT,
    r"responses::test_(reasoning_text|the_events_are|the_clients_own)": _REASONING,
    r"responses::test_an_answer_that_is_cut_off.*True": "its stream ends with response.completed",
    r"responses::test_what_is_not_done.*previous_response_id": "it may be stored there; a 404",
    r"responses::test_what_is_not_done.*(conversation|truncation|arguments|-n)\]": _LENIENT,
    r"responses::test_what_is_not_done.*(tools.0.name|True.*text)\]": _LENIENT,
    r"responses::test_nothing_is_stored": "it has no field `store`",
    r"tools::test_what_a_model_writes.*\[(reasoning|all)-": _REASONING,
    r"tools::test_what_a_model_writes.*(text and a call|no JSON|no name|name alone|half)": _READING,
    r"tools::test_a_demanded_call_follows.*named": "a named call ends with `stop`",
    r"(messages|responses)::test_a_demanded_call": _SPACE,
    r"tools::test_several_answers": _SPACE,
    r"agents::test_the_same_loop_by_messages": _SPACE,
    r"tools::test_a_demanded_call_that_is_cut_off": "a call that is cut off is text",
    r"tools::test_(reasoning_that_the_prompt|a_demanded_form_begins)": _REASONING,
    r"tools::test_what_means_nothing.*wrong[3-8]-": _LENIENT,
    r"tools::test_tools_and_what_came": "its tools have `description: null`",
    r"vllm_fields::test_what_cannot_be_told.*completions-wrong1": "echo may have prompt_logprobs",
    r"vllm_fields::test_special_tokens": "a token that ends a text is never told",
}  # fmt: skip


def reason_to_skip(name, file):
    """Why a test does not apply; None: it does."""
    test = f"{file.removeprefix('test_')}::{name}"
    return next((why for which, why in LACKS.items() if re.match(which, test)), None)
