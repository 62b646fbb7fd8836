"""The Responses dialect: items in, items out, and the events between."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from leadline.serving.responses.store import ResponseStore, Stored
from leadline.serving.responses.tools import FreeFormInput
from leadline.text.tokenizer import Tokenizer
from tests.serving.conftest import HELLO, MakeRig, Rig, both_profiles
from tests.serving.test_chat import CALL

PATH = "/v1/responses"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
}
PATCH = {"type": "custom", "name": "patch", "description": "Edits files."}
STORING = {"enable_responses_store": True}


def calling(name: str, parameter: str, value: str) -> str:
    """An answer that calls a tool with one string."""
    return (
        f'ok</think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="{name}">\n'
        f'<｜DSML｜ parameter name="{parameter}" string="true">{value}</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )


def ask(server: Rig, **body: Any) -> Any:
    return server.post(PATH, **({"input": "Hi"} | body))


def events(server: Rig, **body: Any) -> list[Any]:
    return server.events(PATH, **({"input": "Hi"} | body))


def without_ids(item: Any) -> Any:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def test_answer_has_reasoning_and_message_items(rig: MakeRig) -> None:
    reply = ask(rig("Hm.</think>Hello!"), metadata={"a": "b"}, max_output_tokens=99)
    reasoning, message = reply["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert reasoning["summary"] == []
    assert message["role"] == "assistant"
    assert [part["text"] for part in message["content"]] == ["Hello!"]
    assert {item["status"] for item in reply["output"]} == {"completed"}
    assert (reply["object"], reply["status"], reply["model"]) == ("response", "completed", "tiny")
    assert (reply["metadata"], reply["max_output_tokens"]) == ({"a": "b"}, 99)
    assert reply["id"].startswith("resp_")


@both_profiles
@pytest.mark.parametrize("step", [1, 3, 1000], ids=lambda n: f"step={n}")
@pytest.mark.parametrize("text", ["Hm.</think>Hello 😀", CALL, calling("patch", "input", 'a\n"é')])
def test_c33_stream_is_numbered_and_equals_the_whole(rig: MakeRig, text: str, step: int) -> None:
    ids = [*rig("").tokenizer.encode(text), 1]
    steps = [ids[i : i + step] for i in range(0, len(ids), step)]
    stream = events(rig(steps), tools=[WEATHER, PATCH])
    whole = ask(rig([ids]), tools=[WEATHER, PATCH])
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    types = [event["type"] for event in stream]
    assert types[:2] == ["response.created", "response.in_progress"]
    terminal = [t for t in types if t in ("response.completed", "response.incomplete")]
    assert terminal == [types[-1]] == ["response.completed"]
    final = stream[-1]["response"]
    assert final["id"] == stream[0]["response"]["id"]
    assert final["usage"] == whole["usage"]
    assert list(map(without_ids, final["output"])) == list(map(without_ids, whole["output"]))
    check_items(stream, final["output"])


def check_items(stream: list[Any], output: list[Any]) -> None:
    """Every item is opened, told in pieces that join to its text, and closed under one id."""
    added = [e for e in stream if e["type"] == "response.output_item.added"]
    done = [e for e in stream if e["type"] == "response.output_item.done"]
    assert [e["item"]["id"] for e in added] == [item["id"] for item in output]
    assert [e["item"] for e in done] == output
    for index, item in enumerate(output):
        own = [e for e in stream if e.get("item_id") == item["id"]]
        assert {e["output_index"] for e in own} == {index}
        text = "".join(e["delta"] for e in own if e["type"].endswith(".delta"))
        match item["type"]:
            case "reasoning" | "message":
                assert text == item["content"][0]["text"]
            case "function_call":
                assert text == item["arguments"]
            case "custom_tool_call":
                assert text == item["input"]


def test_a_cut_answer_is_incomplete(rig: MakeRig) -> None:
    stream = events(rig("</think>one two three"), max_output_tokens=3)
    final = stream[-1]
    assert final["type"] == "response.incomplete"
    assert final["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert final["response"]["output"][-1]["status"] == "incomplete"


@both_profiles
def test_c33_a_failure_in_mid_stream_is_the_terminal_event(rig: MakeRig) -> None:
    stream = events(rig([(66,), RuntimeError("secret")], end=False))
    assert [e["type"] for e in stream].count("response.failed") == 1
    assert [e["sequence_number"] for e in stream] == list(range(len(stream)))
    final = stream[-1]["response"]
    assert (final["status"], final["error"]["code"]) == ("failed", "internal_error")
    assert "secret" not in str(stream)


@both_profiles
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_c60_usage_tells_what_was_cached(rig: MakeRig, stream: bool) -> None:
    server = rig("Hm</think>Hello")
    server.engine.num_cached_tokens = 3
    usage = events(server)[-1]["response"]["usage"] if stream else ask(server)["usage"]
    assert usage["input_tokens"] == len(server.engine.requests[0].prompt_token_ids)
    assert usage["input_tokens_details"]["cached_tokens"] == 3
    assert usage["output_tokens_details"]["reasoning_tokens"] > 0
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_items_are_rendered_as_a_chat(rig: MakeRig) -> None:
    server = rig("x")
    ask(
        server,
        instructions="Be brief.",
        tools=[WEATHER],
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "x", "text": "Look."}]},
            {"type": "message", "role": "assistant", "content": "On it."},
            {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "get_weather", "arguments": "{}"},
            {"type": "item_reference", "id": "x"},
            {"type": "function_call_output", "call_id": "b", "output": "2"},
            {"type": "function_call_output", "call_id": "a", "output": [
                {"type": "input_text", "text": "1"}
            ]},
        ],
    )  # fmt: skip
    by_items = server.prompt
    function = {key: value for key, value in WEATHER.items() if key != "type"}
    called = {"name": "get_weather", "arguments": "{}"}
    server.chat(
        tools=[{"type": "function", "function": function}],
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "reasoning_content": "Look.",
                "content": "On it.",
                "tool_calls": [{"id": i, "type": "function", "function": called} for i in "ab"],
            },
            {"role": "tool", "tool_call_id": "a", "content": "1"},
            {"role": "tool", "tool_call_id": "b", "content": "2"},
        ],
    )
    assert by_items == server.prompt
    assert "<think>Look.</think>On it.\n\n<｜DSML｜ calls>" in by_items


def test_a_custom_tool_takes_and_returns_free_text(rig: MakeRig) -> None:
    server = rig(calling("patch", "input", "*** Begin\n+a \\ b"))
    past = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "old\ntext"}
    result = {"type": "custom_tool_call_output", "call_id": "c", "output": "done"}
    reply = ask(server, tools=[PATCH], input=[{"role": "user", "content": "go"}, past, result])
    item = reply["output"][-1]
    assert (item["type"], item["name"]) == ("custom_tool_call", "patch")
    assert item["input"] == "*** Begin\n+a \\ b"
    assert 'name="input" string="true">old\ntext</' in server.prompt
    assert "<tool_result>done</tool_result>" in server.prompt


def test_a_custom_call_of_another_form_keeps_its_text(rig: MakeRig) -> None:
    reply = ask(rig(calling("patch", "patch", "a")), tools=[PATCH])
    assert json.loads(reply["output"][-1]["input"]) == {"patch": "a"}


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_free_form_input_is_read_from_any_fragments(size: int) -> None:
    text = 'a "quoted" \\ back\nslash é 😀 \x01'
    raw = json.dumps({"input": text})
    reader = FreeFormInput()
    pieces = [reader.push(raw[i : i + size]) for i in range(0, len(raw), size)]
    assert "".join(pieces) + reader.finish() == text


def test_tools_of_a_namespace_are_mapped_back(rig: MakeRig) -> None:
    server = rig(calling("fs::read", "path", "x"))
    group = {
        "type": "namespace",
        "name": "fs",
        "description": "Files.",
        "tools": [{"type": "function", "name": "read", "description": "Reads."}],
    }
    reply = ask(server, tools=[group, {"type": "web_search"}])
    item = reply["output"][-1]
    assert (item["name"], item["namespace"]) == ("read", "fs")
    assert (
        '{"name": "fs::read", "description": "Files.\\nReads.", "parameters": {}}' in server.prompt
    )
    assert "web_search" not in server.prompt
    ask(server, tools=[group], input=[{"role": "user", "content": "go"}, item])
    assert 'invoke name="fs::read"' in server.prompt.partition("<｜User｜>")[2]


@pytest.mark.parametrize("rig", ["v4"], indirect=True)
def test_c64_a_model_without_namespaces_knows_their_tools_by_plain_names(rig: MakeRig) -> None:
    server = rig(calling("fs__read", "path", "x"))
    group = {"type": "namespace", "name": "fs", "tools": [{"type": "function", "name": "read"}]}
    choice = {"type": "function", "namespace": "fs", "name": "read"}
    item = ask(server, tools=[group], tool_choice=choice)["output"][-1]
    assert (item["name"], item["namespace"]) == ("read", "fs")
    ask(server, tools=[group], input=[{"role": "user", "content": "go"}, item])
    assert 'invoke name="fs__read"' in server.prompt.partition("<｜User｜>")[2]


@pytest.mark.parametrize(
    ("choice", "is_free"),
    [
        ("auto", False),
        ("required", False),
        ({"type": "function", "name": "get_weather"}, False),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "get_weather"}],
            },
            False,
        ),
        ("none", True),
    ],
    ids=["auto", "required", "function", "allowed", "none"],
)
def test_tool_choice(rig: MakeRig, choice: Any, is_free: bool) -> None:
    server = rig("Hm</think>Hello")
    reply = ask(server, tools=[WEATHER], tool_choice=choice)
    assert (server.engine.requests[0].constraint is None) == is_free
    assert reply["tool_choice"] == choice


def test_text_format_effort_and_sampling(rig: MakeRig) -> None:
    server = rig("Hm</think>{}")
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    reply = ask(server, text={"format": form}, reasoning={"effort": "max"}, temperature=0.5)
    assert server.engine.requests[0].constraint is not None
    assert "Reasoning Effort: 100" in server.prompt
    assert "## Response Format:" in server.prompt
    assert server.engine.requests[0].sampling.temperature == 0.5
    assert reply["text"]["format"] == form
    assert reply["reasoning"]["effort"] == "max"


def test_effort_none_turns_thinking_off(rig: MakeRig) -> None:
    server = rig("Hello")
    assert [item["type"] for item in ask(server, reasoning={"effort": "none"})["output"]] == [
        "message"
    ]


@pytest.mark.parametrize("size", [1, 2, 100])
def test_c41_logprobs_belong_to_the_text(rig: MakeRig, tokenizer: Tokenizer, size: int) -> None:
    """Also where an output of the engine holds the end of the reasoning and the text."""
    ids = tokenizer.encode("Hm</think>Hello")
    server = rig([ids[i : i + size] for i in range(0, len(ids), size)])
    include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    reasoning, message = ask(server, include=include, top_logprobs=2)["output"]
    assert reasoning["encrypted_content"] == ""
    tokens = "".join(entry["token"] for entry in message["content"][0]["logprobs"])
    assert tokens == "Hello"
    assert len(message["content"][0]["logprobs"][0]["top_logprobs"]) == 2


@pytest.mark.parametrize("interval", [1, 3, 100])
def test_c41_logprobs_of_a_stream_are_those_of_its_text(rig: MakeRig, interval: int) -> None:
    server = rig("Hm</think>Hello", stream_interval=interval)
    stream = events(server, top_logprobs=1)
    sent = [entry for event in stream if "delta" in event for entry in event.get("logprobs", ())]
    assert "".join(entry["token"] for entry in sent) == "Hello"
    assert stream[-1]["response"]["output"][-1]["content"][0]["logprobs"] == sent


@pytest.mark.parametrize(
    ("item", "path"),
    [
        ({"type": "hologram"}, "input[0].type"),
        ({"type": "message", "role": "robot"}, "input[0].role"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "input[0].content[0].type"),
        (3, "input[0]"),
    ],
    ids=["item", "role", "image", "file", "number"],
)
def test_what_is_not_known_is_refused(rig: MakeRig, item: Any, path: str) -> None:
    assert rig("x").refuse(PATH, input=[item])["param"] == path


def test_without_a_store_nothing_can_be_continued(rig: MakeRig) -> None:
    error = rig("x").refuse(PATH, input="Hi", previous_response_id="resp_1")
    assert error["code"] == "previous_response_not_found"
    assert rig("x").refuse(PATH, input="Hi", background=True)["param"] == "background"
    assert ask(rig("a</think>b"), store=True)["store"] is False


def test_a_stored_response_is_read_and_continued(rig: MakeRig) -> None:
    server = rig("Hm</think>Hello", **STORING)
    first = ask(server)
    assert server.http.get(f"{PATH}/{first['id']}").json() == first
    second = ask(server, input="More", previous_response_id=first["id"])
    assert "<｜User｜>Hi<｜Assistant｜></think>Hello" in server.prompt
    assert server.prompt.endswith("<｜User｜>More<｜Assistant｜><think>")
    ask(server, input="Still", previous_response_id=second["id"], store=False)
    assert server.prompt.count("<｜User｜>") == 3
    assert server.http.get(f"{PATH}/resp_other").status_code == 404


async def background(server: Rig, *requests: tuple[str, str]) -> list[Any]:
    """Begin a response in the background; send the requests, on one event loop."""
    transport = httpx.ASGITransport(server.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        begun = (await client.post(PATH, json={"input": "Hi", "background": True})).json()
        replies = [begun]
        for method, suffix in requests:
            for _ in range(100):  # turns of the loop, for the engine
                await asyncio.sleep(0)
            reply = await client.request(method, f"{PATH}/{begun['id']}{suffix}")
            replies.append(reply.json())
        return replies


def test_a_background_response_is_read_later(rig: MakeRig) -> None:
    server = rig("Hm</think>Hello", **STORING)
    queued, last = asyncio.run(background(server, ("GET", "")))
    assert queued["status"] == "queued"
    assert last["status"] == "completed"
    assert last["output"][-1]["content"][0]["text"] == "Hello"


def test_a_background_response_can_be_cancelled(rig: MakeRig) -> None:
    server = rig([(66,)] * 100_000, end=False, **STORING)
    requests = [("GET", ""), ("POST", "/cancel"), ("GET", "")]
    statuses = [reply["status"] for reply in asyncio.run(background(server, *requests))]
    assert statuses == ["queued", "in_progress", "cancelled", "cancelled"]
    assert server.engine.aborted


def test_a_background_response_keeps_its_place_until_it_ends(rig: MakeRig) -> None:
    server = rig("Hm</think>Hello", max_concurrency_per_key=1, **STORING)
    admission = server.app.state.server.admission

    async def test() -> None:
        gate = server.engine.gate = asyncio.Event()
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"input": "Hi", "background": True}
            path = f"{PATH}/{(await client.post(PATH, json=body)).json()['id']}"
            for _ in range(100):  # turns of the loop
                await asyncio.sleep(0)
            assert admission.num_open == 1
            assert (await client.post(PATH, json=body)).status_code == 429
            gate.set()
            await asyncio.wait_for(admission.idle(), 10)
            assert (await client.get(path)).json()["status"] == "completed"

    asyncio.run(test())


def test_a_stored_response_belongs_to_its_key(rig: MakeRig) -> None:
    server = rig("Hm</think>Hello", api_key=("mine", "yours"), **STORING)
    server.http.headers["x-api-key"] = "mine"
    path = f"{PATH}/{ask(server)['id']}"
    assert server.http.get(path).status_code == 200
    assert server.http.get(path, headers={"x-api-key": "yours"}).status_code == 404


def test_truncation_auto_leaves_out_the_oldest_turns(rig: MakeRig) -> None:
    server = rig("x")
    turns = [{"role": "user", "content": f"turn {i}" + " the" * 3000} for i in range(5)]
    ask(server, instructions="Be brief.", input=turns, truncation="auto")
    assert "Be brief." in server.prompt
    assert "turn 4" in server.prompt
    assert "turn 3" in server.prompt
    assert "turn 2" not in server.prompt
    error = server.refuse(PATH, input=turns)
    assert error["code"] == "context_length_exceeded"


def test_the_store_is_bounded_and_forgets() -> None:
    now = 0.0
    store = ResponseStore(clock=lambda: now)
    for i in range(1500):
        store.put(Stored({"id": str(i)}, [], "me", 1))
    assert store.get("499", "me") is None
    assert store.get("500", "me") is not None
    assert store.get("500", "you") is None
    store.put(Stored({"id": "large"}, [], "me", 256 * 2**20))
    assert store.get("1499", "me") is None
    assert store.get("large", "me") is not None
    store.put(Stored({"id": "too large"}, [], "me", 257 * 2**20))
    assert store.get("too large", "me") is None
    store.put(Stored({"id": "last"}, [], "me", 1))
    now = 3601.0
    assert store.get("last", "me") is None


@pytest.mark.parametrize("path", [PATH, "/v1/messages"])
def test_the_name_of_a_dropped_tool_makes_no_line_of_the_log(
    rig: MakeRig, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    tool = {"type": "web_search_2026\nERROR all is lost" + "!" * 500, "name": "web_search"}
    body = {"input": "Hi", "messages": HELLO, "max_tokens": 8, "tools": [tool]}
    reply = rig("</think>a").http.post(path, json=body)
    assert reply.status_code == (200 if path == "/v1/messages" else 400)
    assert not any("\n" in record.getMessage() for record in caplog.records)
    assert not any(len(record.getMessage()) > 200 for record in caplog.records)


def test_models_and_prefixless_path(rig: MakeRig) -> None:
    assert rig("x").post("/responses", input=HELLO)["object"] == "response"
