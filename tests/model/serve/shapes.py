"""Requests as two coding agents and some frameworks send them, and what of each is left out.

The forms are those of the agents' public sources (openai/codex, `codex-rs/tools/src/tool_spec.rs`
and `codex-rs/protocol/src/models.rs`; Anthropic's interface for the other); the texts are ours.
"""

from typing import NamedTuple


class Shape(NamedTuple):
    """A request, and the names that its header `Warning` has, in their order."""

    path: str
    body: dict[str, object]
    warned: tuple[str, ...] = ()


def _message(role, text, kind="input_text"):
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def _function(name, **properties):
    schema = {"type": "object", "properties": properties, "required": [*properties],
              "additionalProperties": False}  # fmt: skip
    return {"type": "function", "name": name, "description": name, "strict": False,
            "parameters": schema}  # fmt: skip


TEXT = {"type": "string"}
SHELL = _function("shell_command", command=TEXT)
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit files.",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}  # fmt: skip
MCP = {"type": "namespace", "name": "mcp__docs", "description": "Docs.",
       "tools": [_function("find", query=TEXT)]}  # fmt: skip
SEARCH = {"type": "web_search", "external_web_access": False}
CODEX = {
    "model": "tiny", "instructions": "You write code.", "tools": [SHELL], "tool_choice": "auto",
    "input": [_message("developer", "Be brief."), _message("user", "Fix the test.")],
    "parallel_tool_calls": True, "store": False, "stream": True, "include": [],
    "prompt_cache_key": "0199", "max_output_tokens": 2, "temperature": 0,
}  # fmt: skip
CALL = {"type": "function_call", "call_id": "c1", "name": "shell_command",
        "arguments": '{"command": "ls"}'}  # fmt: skip
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "a.py"}
PATCHED = {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch",
           "status": "completed", "input": "*** Begin Patch\n*** End Patch"}  # fmt: skip
SHELLED = {"type": "local_shell_call", "call_id": "c3", "status": "completed",
           "action": {"type": "exec", "command": ["ls"], "env": {}}}  # fmt: skip


def _codex(*warned, after=(), **fields):
    body = {**CODEX, **fields}
    return Shape("/v1/responses", {**body, "input": [*body["input"], *after]}, warned)


CODEX_SHAPES = {
    "function tools": _codex(),
    "encrypted reasoning asked for": _codex(
        "include", include=["reasoning.encrypted_content"],
        reasoning={"effort": "medium", "summary": "auto"},
    ),
    "verbosity": _codex("text.verbosity", text={"verbosity": "low"}),
    "metadata of the client": _codex("client_metadata", client_metadata={"session": "0199"}),
    "service tier": _codex(service_tier="auto"),
    "web_search": _codex("tools.1 (web_search)", tools=[SHELL, SEARCH]),
    "web_search_preview": _codex("tools.0 (web_search_preview)",
                                 tools=[{"type": "web_search_preview"}, SHELL]),
    "local_shell": _codex("tools.0 (local_shell)", tools=[{"type": "local_shell"}]),
    "shell": _codex("tools.0 (shell)", tools=[{"type": "shell", "environment": {"type": "local"}}]),
    "apply_patch as a tool of its own": _codex("tools.1 (apply_patch)",
                                               tools=[SHELL, {"type": "apply_patch"}]),
    "a custom tool": _codex(tools=[SHELL, PATCH]),
    "image_generation": _codex("tools.1 (image_generation)", tools=[
        SHELL, {"type": "image_generation", "output_format": "png"}]),
    "tool_search": _codex("tools.1 (tool_search)", tools=[
        SHELL, {"type": "tool_search", "execution": "client", "description": "Find tools.",
                "parameters": {"type": "object", "properties": {"query": TEXT}}}]),
    "a namespace": _codex(tools=[SHELL, MCP]),
    "all of them": _codex("tools.3 (web_search)", "tools.4 (image_generation)", tools=[
        SHELL, PATCH, MCP, SEARCH, {"type": "image_generation", "output_format": "png"}]),
    "servers of MCP": _codex("tools.1 (mcp)", tools=[
        SHELL, {"type": "mcp", "server_label": "d", "server_url": "https://d.example",
                "require_approval": "never"}]),
    "file_search and code_interpreter": _codex(
        "tools.0 (file_search)", "tools.1 (code_interpreter)", tools=[
            {"type": "file_search", "vector_store_ids": ["v"]},
            {"type": "code_interpreter", "container": {"type": "auto"}}, SHELL]),
    "a computer": _codex("tools.0 (computer_use_preview)", tools=[
        {"type": "computer_use_preview", "display_width": 9, "display_height": 9,
         "environment": "linux"}]),
    "a turn with a call": _codex(after=[CALL, RESULT]),
    "a result in parts": _codex(after=[CALL, {**RESULT, "output": [
        {"type": "input_text", "text": "a.py"}]}]),
    "a call in a namespace": _codex(tools=[MCP], after=[
        {**CALL, "name": "find", "namespace": "mcp__docs", "arguments": '{"query": "x"}'}, RESULT]),
    "a turn with a patch": _codex(tools=[PATCH], after=[
        PATCHED, {"type": "custom_tool_call_output", "call_id": "c2", "output": "Done."}]),
    "a turn in the local shell": _codex(after=[
        SHELLED, {"type": "local_shell_call_output", "id": "c3", "output": "a.py"}]),
    "a turn with a search": _codex("input.2 (web_search_call)", after=[
        {"type": "web_search_call", "id": "ws_1", "status": "completed",
         "action": {"type": "search", "query": "pytest"}},
        _message("assistant", "Found it.", "output_text"), _message("user", "Go on.")]),
    "reasoning that is encrypted": _codex("input.2 (reasoning)", after=[
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}, CALL, RESULT]),
    "reasoning with a summary": _codex(after=[
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Look first."}],
         "content": None, "encrypted_content": "gAAA"}, CALL, RESULT]),
    "a reference to an item": _codex("input.2 (item_reference)", after=[
        {"type": "item_reference", "id": "msg_1"}, _message("user", "Go on.")]),
    "a compaction": _codex("input.2 (compaction)", after=[
        {"type": "compaction", "encrypted_content": "gAAA"}, _message("user", "Go on.")]),
    "an image that was generated": _codex("input.2 (image_generation_call)", after=[
        {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "QQ=="},
        _message("user", "Go on.")]),
    "an item that nothing knows yet": _codex("input.2 (ghost_snapshot)", after=[
        {"type": "ghost_snapshot", "content": {"id": 5}, "output": 7}, _message("user", "Go on.")]),
    "an empty text": _codex(input=[_message("user", "")]),
    "instructions alone": _codex(input=[]),
    "an output by a schema": _codex(tools=[], text={"format": {
        "type": "json_schema", "name": "out", "strict": True,
        "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
                   "additionalProperties": False}}}),
}  # fmt: skip


EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
READ = {"name": "Read", "description": "Read a file.",
        "input_schema": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object",
                         "properties": {"file_path": TEXT}, "required": ["file_path"],
                         "additionalProperties": False}}  # fmt: skip
USED = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "a.py"}}
RESULTS = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "x = 1"}
HELLO = [{"role": "user", "content": [{"type": "text", "text": "Fix the test.", **EPHEMERAL}]}]
CLAUDE = {
    "model": "tiny", "max_tokens": 2, "stream": True, "temperature": 0, "messages": HELLO,
    "system": [{"type": "text", "text": "You write code.", **EPHEMERAL}], "tools": [READ],
    "metadata": {"user_id": "user_1_account__session_2"},
}  # fmt: skip


def _claude(*warned, path="/v1/messages", after=(), **fields):
    body = {**CLAUDE, **fields}
    return Shape(path, {**body, "messages": [*body["messages"], *after]}, warned)


def _turn(*blocks):
    return {"role": "assistant", "content": [*blocks]}


def _user(*blocks):
    return {"role": "user", "content": [*blocks]}


CLAUDE_SHAPES = {
    "its own tools": _claude(),
    "adaptive thinking": _claude(thinking={"type": "adaptive"}, output_config={"effort": "high"}),
    "thinking with a budget": _claude(thinking={"type": "enabled", "budget_tokens": 1024}),
    "context management": _claude("context_management", context_management={
        "edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "betas in the body": _claude("betas", betas=["context-management-2025-06-27"]),
    "a search on the server": _claude("tools.1 (web_search_20250305)", tools=[
        READ, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]),
    "tools that models know": _claude(
        "tools.0 (bash_20250124)", "tools.1 (text_editor_20250728)", "tools.2 (memory_20250818)",
        "tools.3 (computer_20250124)", "tools.4 (code_execution_20250825)", tools=[
            {"type": "bash_20250124", "name": "bash"},
            {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
            {"type": "memory_20250818", "name": "memory"},
            {"type": "computer_20250124", "name": "computer", "display_width_px": 9,
             "display_height_px": 9},
            {"type": "code_execution_20250825", "name": "code_execution"}, READ]),
    "deferred tools": _claude("tools.0 (tool_search_tool_regex_20251119)", tools=[
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
        {**READ, "defer_loading": True, "eager_input_streaming": True, **EPHEMERAL}]),
    "a container and servers of MCP": _claude("container", "mcp_servers", container={"id": "c"},
                                              mcp_servers=[{"type": "url", "url": "x"}]),
    "a probe": Shape("/v1/messages", {
        "model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]}),
    "an empty probe": Shape("/v1/messages", {
        "model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": ""}]}),
    "a count": Shape("/v1/messages/count_tokens", {
        "model": "tiny", "tools": [READ], "messages": [{"role": "user", "content": "foo"}]}),
    "a count with a search": Shape("/v1/messages/count_tokens", {
        "model": "tiny", "messages": HELLO, "tools": [
            {"type": "web_search_20250305", "name": "web_search"}]},
        ("tools.0 (web_search_20250305)",)),
    "a turn with a call": _claude(after=[
        _turn({"type": "thinking", "thinking": "Look.", "signature": "s"}, USED),
        _user({**RESULTS, **EPHEMERAL})]),
    "a failed call": _claude(after=[
        _turn(USED), _user({**RESULTS, "is_error": True, "content": [
            {"type": "text", "text": "There is no such file."}]})]),
    "hidden thinking": _claude("messages.1.content.0 (redacted_thinking)", after=[
        _turn({"type": "redacted_thinking", "data": "gAAA"}, USED), _user(RESULTS)]),
    "a turn with a search": _claude(
        "messages.1.content.0 (server_tool_use)", "messages.1.content.1 (web_search_tool_result)",
        after=[
            _turn({"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search",
                   "input": {"query": "pytest"}},
                  {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [
                      {"type": "web_search_result", "url": "u", "title": "t",
                       "encrypted_content": "gAAA"}]},
                  {"type": "text", "text": "Found it.", "citations": []}),
            _user({"type": "text", "text": "Go on."})]),
    "a document of text": _claude(after=[_user(
        {"type": "document", "title": "Notes", "citations": {"enabled": True},
         "source": {"type": "text", "media_type": "text/plain", "data": "One."}},
        {"type": "text", "text": "Sum it up."})]),
    "results that refer to tools": _claude(
        "messages.2.content.0.content.0 (tool_reference)", after=[
        _turn(USED), _user({**RESULTS, "content": [
            {"type": "tool_reference", "tool_name": "Read"},
            {"type": "text", "text": "Found."}]})]),
    "a reminder by the system": _claude(after=[{"role": "system", "content": "Be brief."}]),
    "a title by a schema": _claude(tools=[], output_config={"format": {
        "type": "json_schema", "schema": {
            "type": "object", "properties": {"title": TEXT}, "required": ["title"],
            "additionalProperties": False}}}),
}  # fmt: skip

BOOLEAN = {"type": "object", "properties": {"a": {"title": "A", "type": "boolean"}},
           "required": ["a"], "title": "A"}  # fmt: skip
CLOSED = {**BOOLEAN, "additionalProperties": False}
TYPED = {"type": "json_schema", "json_schema": {"name": "A", "schema": CLOSED, "strict": True}}
FLIP = {"type": "function", "function": {"name": "flip", "description": "Flip.", "strict": True,
                                         "parameters": CLOSED}}  # fmt: skip
FLAT = {"type": "function", **FLIP["function"]}
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "Is it?"}], "temperature": 0.0}
GUIDE = 'start: r\nr[capture, max_tokens=20]: "yes" | "no"\n'


def _chat(*warned, **fields):
    return Shape("/v1/chat/completions", {**ASKED, **fields}, warned)


def _response(*warned, **fields):
    body = {"model": "tiny", "input": [{"role": "user", "content": "Is it?"}], "temperature": 0.0}
    return Shape("/v1/responses", {**body, "max_output_tokens": 60, **fields}, warned)


def _legacy(**fields):
    return Shape("/v1/completions", {"model": "tiny", "max_tokens": 20, **fields})


FRAMEWORK_SHAPES = {
    "litellm, a response": _response("truncation", tools=[FLAT], tool_choice="required",
                                     truncation="auto", store=True),
    "litellm, a form by Anthropic's interface": Shape("/v1/messages", {
        "model": "tiny", "max_tokens": 60, "messages": HELLO, "tool_choice": {
            "type": "tool", "name": "json_tool_call"},
        "tools": [{"name": "json_tool_call", "input_schema": CLOSED}]}),
    "langchain, a text": _legacy(
        prompt=["x"], frequency_penalty=0, presence_penalty=0, logit_bias={}, logprobs=None,
        n=1, best_of=1, seed=-1, temperature=0.7, top_p=1),
    "langchain, a form": _chat(stream=False, max_completion_tokens=60, response_format=TYPED),
    "langchain, a form by a call": _chat(
        stream=False, max_completion_tokens=60, parallel_tool_calls=False, tools=[FLIP],
        tool_choice={"type": "function", "function": {"name": "flip"}}),
    "langchain, a response with a search": _response(
        "tools.1 (web_search_preview)", stream=False,
        tools=[FLAT, {"type": "web_search_preview"}], tool_choice="required"),
    "langchain, a form of messages": Shape("/v1/messages", {
        "model": "tiny", "max_tokens": 60, "messages": HELLO, "output_config": {
            "format": {"type": "json_schema", "schema": CLOSED}}}),
    "pydantic-ai, a form by a call": _chat(max_completion_tokens=60, stream=False, tools=[FLIP],
                                           tool_choice="required"),
    "openai-agents, a form": _response(
        include=[], tools=[], text={"format": {
            "type": "json_schema", "name": "final_output", "schema": CLOSED, "strict": True}}),
    "openai-agents, a search": _response(
        "truncation", "text.verbosity", "tools.1 (web_search)", include=[], store=True,
        text={"verbosity": "low"}, truncation="auto", tools=[
            FLAT, {"type": "web_search", "filters": None, "user_location": None,
                   "search_context_size": "medium"}]),
    "instructor, a form and a demanded call": _response(
        text={"format": {"type": "json_schema", "name": "A", "schema": CLOSED, "strict": True}},
        tools=[{**FLAT, "strict": None}], tool_choice={"type": "function", "name": "flip"}),
    "instructor, a strict call": _chat(max_tokens=60, tools=[FLIP], tool_choice={
        "type": "function", "function": {"name": "flip"}}),
    "smolagents": _chat(max_tokens=60, stop=["Observation:", "Calling tools:"], tools=[FLIP],
                        tool_choice="required"),
    "dspy": _chat(max_completion_tokens=60, response_format={"type": "json_object"}),
    "dspy, a text": _legacy(prompt="x\n\nBEGIN RESPONSE:", temperature=0),
    "guidance": _chat(
        "guided_decoding_backend", stream=True, logprobs=True, top_logprobs=5, top_p=None,
        tools=None, stream_options={"include_usage": True}, guided_decoding_backend="guidance",
        guided_grammar=GUIDE, structured_outputs={"grammar": GUIDE}),
}  # fmt: skip

SHAPES = {
    f"{sender}: {name}": shape
    for sender, shapes in (
        ("codex", CODEX_SHAPES), ("claude", CLAUDE_SHAPES), ("framework", FRAMEWORK_SHAPES),
    )
    for name, shape in shapes.items()
}  # fmt: skip
