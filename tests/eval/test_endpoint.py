from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from leadline.core.errors import BadRequest, ConfigError, LeadlineError
from leadline.eval import endpoint
from leadline.eval.endpoint import ask_endpoint, evaluate_endpoint, judged_turns, make_client
from leadline.eval.exercise import Chat
from leadline.eval.measure import Record
from leadline.eval.options import EvalOptions
from leadline.text.chat import ResponseFormat, Tool
from tests.serving.conftest import MakeRig, rig
from tests.serving.live import serving
from tests.serving.test_chat import CALL

__all__ = ["rig"]  # a fixture of another folder

ASKS = {"role": "user", "content": "Which colour?"}
BLUE = {"role": "assistant", "content": "It is blue."}


def ask(url: str, *chats: Chat, advance: Callable[[], object] = lambda: None) -> list[Record]:
    async def run() -> list[Record]:
        async with make_client(f"{url}/v1", None) as client:
            turns = judged_turns(chats)
            return await ask_endpoint(client, "tiny", turns, concurrency=2, advance=advance)

    return asyncio.run(run())


def test_every_judged_turn_is_asked_with_the_right_answers_before_it(rig: MakeRig) -> None:
    server, seen = rig("The colour is blue."), []
    chat = Chat("recall", [ASKS, BLUE] * 3, wanted=["blue", None, "red"])
    with serving(server.app) as url:
        first, last = ask(url, chat, advance=lambda: seen.append(1))
    assert (first.correct, last.correct) == (True, False)
    assert (first.cell, last.cell) == ("turn 1", "turn 3")
    assert first.dialogue == last.dialogue == 0
    assert first.kl is None
    assert len(seen) == 2
    prompts = [server.tokenizer.decode(r.prompt_token_ids) for r in server.engine.requests]
    assert sorted(prompt.count("It is blue.") for prompt in prompts) == [0, 2]
    assert {request.sampling.temperature for request in server.engine.requests} == {0}


def test_chats_think_as_they_were_made_to(rig: MakeRig) -> None:
    server = rig("Hm, blue</think>The colour is red.")
    chats = [
        Chat("x", [ASKS, BLUE], wanted=["red"], thinking=thinks, reasoning_effort=30)
        for thinks in (True, False)
    ]
    with serving(server.app) as url:
        thinking, _ = ask(url, *chats)
    assert thinking.correct  # by what stands behind the reasoning
    prompts = [server.tokenizer.decode(r.prompt_token_ids) for r in server.engine.requests]
    assert sorted(prompt.endswith("<think>") for prompt in prompts) == [False, True]


def test_calls_are_compared(rig: MakeRig) -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Paris", "days": 2}'}
    call = {"id": "1", "type": "function", "function": function}
    other = {**call, "function": {**function, "arguments": '{"city": "Rome"}'}}
    schema = {"type": "object", "properties": {"city": {}, "days": {}}}
    chats = [
        Chat(
            "tool_calls",
            [ASKS, {"role": "assistant", "content": "", "tool_calls": [made]}],
            wanted=[None],
            tools=(Tool("get_weather", parameters=schema),),
        )
        for made in (call, other)
    ]
    with serving(rig(CALL).app) as url:
        records = ask(url, *chats)
    assert {record.parses for record in records} == {True}
    assert {record.cell for record in records} == {"calls"}
    assert not all(record.correct for record in records)


def test_the_form_of_an_answer_is_asked_for(rig: MakeRig) -> None:
    server = rig('{"colour": "blue"}')
    chat = Chat(
        "json_output",
        [ASKS, {"role": "assistant", "content": '{"colour":"blue"}'}],
        wanted=['{"colour":"blue"}'],
        response_format=ResponseFormat("json_schema", {"type": "object"}),
    )
    with serving(server.app) as url:
        [record] = ask(url, chat)
    assert record.correct
    assert record.parses
    assert server.engine.requests[0].constraint is not None


def test_a_refusal_names_the_server(rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    server = rig("x")
    server.engine.refuse = BadRequest("no such thing")
    monkeypatch.setattr(endpoint, "MAX_RETRIES", 0)
    with serving(server.app) as url, pytest.raises(LeadlineError, match=r"/v1/: .*no such thing"):
        ask(url, Chat("x", [ASKS, BLUE], wanted=["blue"]))


def test_a_report_of_accuracies(rig: MakeRig, tmp_path: Path) -> None:
    with serving(rig("The answer is A.").app) as url:
        options = EvalOptions(
            quick=True, items=2, families="multiple_choice,prose,word_problem", endpoint=f"{url}/v1"
        )
        report = evaluate_endpoint(options, "tiny", "leadline eval ...")
    assert list(report.summary.families) == ["word_problem", "multiple_choice", "all families"]
    assert "| multiple_choice | tiny | 2 |" in report.markdown()
    assert "KL" not in report.markdown()


def test_a_model_has_to_be_named() -> None:
    with pytest.raises(ConfigError, match="endpoint needs --model"):
        evaluate_endpoint(EvalOptions(endpoint="http://localhost/v1"), None, "")
