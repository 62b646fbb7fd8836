"""Raw completions: prompts in four forms, text as generated."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.conftest import MakeRig, Rig, both_profiles

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


@both_profiles
def test_c31_no_token_with_echo_and_logprobs_scores_the_prompt(rig: MakeRig) -> None:
    server = rig("more")
    reply = complete(server, prompt="Once upon", max_tokens=0, echo=True, logprobs=1)
    choice = reply["choices"][0]
    ids = server.engine.requests[0].prompt_token_ids
    assert choice["text"] == "Once upon"
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"][1:]) == "Once upon"
    assert logprobs["token_logprobs"] == [None] + [-0.5] * (len(ids) - 1)
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"][:2] == [0, 0]  # the first token is not shown
    assert reply["usage"]["prompt_tokens"] == len(ids)
    assert reply["usage"]["completion_tokens"] == 0
    assert rig("x").refuse(PATH, prompt="Once", max_tokens=0)["param"] == "max_tokens"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_echo_with_logprobs_covers_prompt_and_answer(rig: MakeRig, stream: bool) -> None:
    server = rig(" more")
    body: dict[str, Any] = {"prompt": "Once", "echo": True, "logprobs": 0, "max_tokens": 99}
    if stream:
        parts = [chunk["choices"][0]["logprobs"] for chunk in server.stream(PATH, **body)]
        tokens = [token for part in parts if part for token in part["tokens"]]
        offsets = [offset for part in parts if part for offset in part["text_offset"]]
    else:
        logprobs = complete(server, **body)["choices"][0]["logprobs"]
        tokens, offsets = logprobs["tokens"], logprobs["text_offset"]
    assert "".join(tokens[1:]) == "Once more"
    assert offsets == [0, *(len("".join(tokens[1:i])) for i in range(1, len(tokens)))]


@both_profiles
def test_c41_a_token_that_is_held_back_keeps_its_entry(rig: MakeRig) -> None:
    text = "a 😀 b"
    chunks = rig(text).stream(PATH, prompt="Once", logprobs=0, max_tokens=99)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["text"] for part in parts) == text
    num_entries = sum(len(part["logprobs"]["tokens"]) for part in parts if part["logprobs"])
    assert num_entries == len(rig("").tokenizer.encode(text))


def test_prompt_logprobs_have_the_candidates_of_every_position(rig: MakeRig) -> None:
    server = rig("x")
    first, *others = complete(server, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    ids = server.engine.requests[0].prompt_token_ids
    assert first is None
    for token_id, candidates in zip(ids[1:], others, strict=True):
        assert candidates[str(token_id)] == {
            "logprob": -0.5,
            "rank": 1,
            "decoded_token": server.tokenizer.decode((token_id,)),
        }
        assert len(candidates) == 3
    refused = rig("x").refuse(PATH, prompt="Once", prompt_logprobs=1, stream=True)
    assert refused["param"] == "prompt_logprobs"


def test_token_ids_are_returned(rig: MakeRig) -> None:
    server = rig("ab")
    body: dict[str, Any] = {"return_token_ids": True, "max_tokens": 99}
    choice = complete(server, **body)["choices"][0]
    assert tuple(choice["prompt_token_ids"]) == server.engine.requests[0].prompt_token_ids
    assert choice["token_ids"] == [*server.tokenizer.encode("ab"), 1]
    chunks = server.stream(PATH, prompt="Once", **body)
    parts = [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]]
    assert parts == choice["token_ids"]


def test_tokens_are_shown_as_ids(rig: MakeRig) -> None:
    body = {"logprobs": 0, "return_tokens_as_token_ids": True}
    tokens = complete(rig([(66,)]), **body)["choices"][0]["logprobs"]["tokens"]
    assert tokens[0] == "token_id:66"


def test_only_the_last_tokens_of_the_prompt_are_kept(rig: MakeRig) -> None:
    server = rig("x")
    ids = list(range(100, 120))
    complete(server, prompt=ids, truncate_prompt_tokens=5)
    assert list(server.engine.requests[0].prompt_token_ids) == ids[-5:]
    complete(server, prompt=[100] * 9000, truncate_prompt_tokens=-1, max_tokens=10)
    assert len(server.engine.requests[1].prompt_token_ids) == 8192 - 10
    assert server.refuse(PATH, prompt=ids, truncate_prompt_tokens=0)["param"] == (
        "truncate_prompt_tokens"
    )


@pytest.mark.parametrize("interval", [1, 3], ids=lambda n: f"interval={n}")
def test_stream_interval_batches_tokens(rig: MakeRig, interval: int) -> None:
    chunks = rig([(66,)] * 8).stream(PATH, prompt="Once", max_tokens=8, stream_interval=interval)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    sizes = {1: [1] * 8, 3: [1, 3, 3, 1]}[interval]
    assert [len(text) for text in texts] == sizes


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": [5000]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"guided_json": {}}, "guided_json"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value)[:40],
)
def test_mistakes_are_named(rig: MakeRig, body: dict[str, Any], param: str) -> None:
    assert rig("x").refuse(PATH, **({"prompt": "Once"} | body))["param"] == param


def test_structured_outputs_constrain_the_text(rig: MakeRig) -> None:
    server = rig("a")
    complete(server, structured_outputs={"choice": ["a", "b"]})
    constraint = server.engine.requests[0].constraint
    assert constraint is not None
    assert constraint.at_once is not None


def test_stream_can_carry_usage(rig: MakeRig) -> None:
    chunks = rig("ab").stream(PATH, prompt="Once", stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] >= 2
    assert chunks[0]["usage"] is None
    assert chunks[0]["object"] == "text_completion"
