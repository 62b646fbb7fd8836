"""Raw completions: prompts in four forms, text as generated."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.conftest import MakeRig, Rig

PATH = "/v1/completions"


def complete(server: Rig, **body: Any) -> Any:
    reply = server.http.post(PATH, json={"prompt": "Once"} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def streamed(server: Rig, index: int = 0, **body: Any) -> str:
    chunks = server.stream(PATH, **({"prompt": "Once"} | body))
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


def test_markers_appear_as_generated_and_the_end_token_does_not(rig: MakeRig) -> None:
    server = rig("a<think>b｜DSML｜c 😀")
    choice = complete(server, max_tokens=99)["choices"][0]
    assert choice["text"] == "a<think>b｜DSML｜c 😀"
    assert choice["finish_reason"] == "stop"
    assert streamed(server, max_tokens=99) == choice["text"]


def test_skip_special_tokens_false_shows_the_end_token(rig: MakeRig) -> None:
    text = complete(rig("a"), skip_special_tokens=False)["choices"][0]["text"]
    assert text == "a<｜end▁of▁sentence｜>"


def test_prompt_forms_give_the_same_ids(rig: MakeRig) -> None:
    server = rig("x")
    ids = [0, *server.tokenizer.encode("Once")]
    for prompt in ("Once", ["Once"], ids, [ids], "<｜begin▁of▁sentence｜>Once"):
        complete(server, prompt=prompt)
    assert {request.prompt_token_ids for request in server.engine.requests} == {tuple(ids)}


def test_add_special_tokens_false_leaves_begin_of_sentence_out(rig: MakeRig) -> None:
    server = rig("x")
    complete(server, add_special_tokens=False)
    assert list(server.engine.requests[0].prompt_token_ids) == server.tokenizer.encode("Once")


def test_suffix_is_a_fill_in_the_middle_prompt(rig: MakeRig) -> None:
    server = rig("x")
    complete(server, prompt="def f(", suffix="return 1")
    assert server.tokenizer.decode(server.engine.requests[0].prompt_token_ids) == (
        "<｜begin▁of▁sentence｜><｜fim▁begin｜>def f(<｜fim▁hole｜>return 1<｜fim▁end｜>"
    )


def test_default_limit_is_16_tokens(rig: MakeRig) -> None:
    reply = complete(rig([(66,)] * 20))
    assert reply["usage"]["completion_tokens"] == 16
    assert reply["choices"][0]["finish_reason"] == "length"


def test_choices_are_numbered_prompt_by_prompt(rig: MakeRig) -> None:
    server = rig("x")
    reply = complete(server, prompt=["one", "two three"], n=2)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    prompts = [request.prompt_token_ids for request in server.engine.requests]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert reply["usage"]["prompt_tokens"] == len(prompts[0]) + len(prompts[2])


@pytest.mark.parametrize(
    ("include", "text"), [(False, "one "), (True, "one STOP")], ids=["cut", "included"]
)
def test_stop_string_ends_the_request(rig: MakeRig, include: bool, text: str) -> None:
    server = rig("one STOP two")
    body: dict[str, Any] = {"stop": "STOP", "include_stop_str_in_output": include, "max_tokens": 99}
    choice = complete(server, **body)["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == (text, "STOP")
    assert server.engine.aborted
    assert streamed(server, **body) == text


def test_echo_puts_the_prompt_first(rig: MakeRig) -> None:
    server = rig(" more")
    assert complete(server, echo=True)["choices"][0]["text"] == "Once more"
    assert streamed(server, echo=True) == "Once more"


def test_logprobs_have_the_old_layout(rig: MakeRig) -> None:
    server = rig("ab cd")
    logprobs = complete(server, logprobs=2, max_tokens=99)["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == "ab cd"
    offsets = [len("".join(logprobs["tokens"][:i])) for i in range(len(logprobs["tokens"]))]
    assert logprobs["text_offset"] == offsets
    assert set(logprobs["token_logprobs"]) == {-0.5}
    # The two most likely, and the sampled one.
    assert [len(top) for top in logprobs["top_logprobs"]] == [3] * len(offsets)


def test_stream_can_carry_usage(rig: MakeRig) -> None:
    chunks = rig("ab").stream(PATH, prompt="Once", stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] >= 2
    assert chunks[0]["usage"] is None
    assert chunks[0]["object"] == "text_completion"
