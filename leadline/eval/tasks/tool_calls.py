"""Conversations with tools: single and parallel calls, chains, failures, and turns without a call.

With tools in the prompt past reasoning stays in it, so with thinking every turn is reasoned.
"""

from __future__ import annotations

import json
import random

from leadline.eval.exercise import Chat, Message
from leadline.eval.tasks import words
from leadline.eval.tasks.family import (
    assistant,
    draw_effort,
    draw_thinking,
    num_tokens,
    system,
    user,
)
from leadline.eval.tasks.smalltalk import draw_talk
from leadline.eval.tasks.tools_in_use import Call, Offered, draw_call, invent, offer, settle

_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant with access to tools.",
    "You are an agent. Use the tools to help the user.",
    "Use the tools where they help.",
    "You are a coding agent. Be brief.",
    "You help the user with every task.",
)
_ALSO = (" ", " Also: ", " And then: ", "\n", " Then ")
_THANKS = ("Thanks!", "Thank you.", "Great, thanks.", "Perfect, thank you!")
_NO_TOOL = "I have no tool for that."
_ERRORS = ("not found", "timeout", "permission denied", "service unavailable", "invalid argument")


class _Dialogue:
    """A conversation in the making.

    Attributes:
        offered: the tools.
        messages: so far.
        wanted: of the assistant's turns so far.
    """

    def __init__(self, rng: random.Random, offered: list[Offered], *, thinking: bool) -> None:
        self.rng = rng
        self.offered = offered
        self.thinking = thinking
        self.messages: list[Message] = []
        self.wanted: list[str | None] = []
        self._num_calls = 0

    def request(self) -> None:
        """A request, the calls that it needs, their results, the answer."""
        form = self.rng.random()
        if form < 0.5:
            calls = [self._draw()]
            request = calls[0].request
        elif form < 0.75:
            calls, request = self._alike()
        else:
            calls = [self._draw() for _ in range(self.rng.choice((2, 2, 3)))]
            request = calls[0].request
            for call in calls[1:]:
                request += self.rng.choice(_ALSO) + call.request
        self.messages.append(user(request))
        if len(calls) > 1 and self.rng.random() < 0.2:  # one after the other
            for call in calls:
                self._call([call])
        else:
            self._call(calls)
        told = [f"{call.name} returned {call.result}" for call in calls]
        self._say(" ".join(call.answer for call in calls), ". ".join(told) + ".", calls[0].value)

    def failure(self) -> None:
        """The tool fails, and the user is told why."""
        call, error = self._draw(), self.rng.choice(_ERRORS)
        self.messages.append(user(call.request))
        self._call([call], result=json.dumps({"error": error}))
        self._say(f"The tool failed: {error}.", f"{call.name} failed with {error}.", error)

    def talk(self) -> None:
        """Nothing that a tool is for."""
        talk = draw_talk(self.rng)
        self.messages.append(user(talk.text))
        self._say(talk.answer, "No tool is needed for this.", None)

    def thanks(self) -> None:
        """The user is content."""
        self.messages.append(user(self.rng.choice(_THANKS)))
        self._say("You are welcome.", "The user thanks me. No tool is needed.", "welcome")

    def missing(self) -> None:
        """A request that none of the tools is for."""
        names = {tool.tool.name for tool in self.offered}
        descriptions = {tool.blueprint.description for tool in self.offered}
        while True:
            other = (offer(self.rng, 1) or [settle(self.rng, invent(self.rng))])[0]
            if other.tool.name not in names and other.blueprint.description not in descriptions:
                break
        self.messages.append(user(draw_call(self.rng, other).request))
        self._say(_NO_TOOL, "None of my tools can do this.", "no tool")

    def _draw(self) -> Call:
        spelled_out = self.rng.random() < 0.3
        return draw_call(self.rng, self.rng.choice(self.offered), spelled_out=spelled_out)

    def _alike(self) -> tuple[list[Call], str]:
        """Calls of one tool with different values, asked for in one sentence."""
        rng = self.rng
        simple = [tool for tool in self.offered if len(tool.blueprint.required) == 1]
        if not simple:
            call = self._draw()
            return [call], call.request
        tool = rng.choice(simple)
        template = rng.choice(tool.blueprint.asks).replace("{+}", "")
        calls: dict[str, Call] = {}
        for _ in range(rng.choice((2, 2, 3))):
            call = draw_call(rng, tool, only_required=True)
            calls[next(iter(call.spoken.values()))] = call
        key = next(iter(tool.blueprint.required)).split("|")[0]
        return list(calls.values()), words.capital(template.format(**{key: words.listed([*calls])}))

    def _call(self, calls: list[Call], *, result: str | None = None) -> None:
        ids = [f"call_{self._num_calls + i}" for i in range(len(calls))]
        self._num_calls += len(calls)
        thought = " ".join(call.thought() for call in calls) if self.thinking else None
        made = [call.message(call_id) for call, call_id in zip(calls, ids, strict=True)]
        self.messages.append(assistant("", thought, made))
        self.wanted.append(None)
        for call, call_id in zip(calls, ids, strict=True):
            content = call.result if result is None else result
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _say(self, content: str, thought: str, wanted: str | None) -> None:
        self.messages.append(assistant(content, thought if self.thinking else None))
        self.wanted.append(wanted)


def tool_calls(rng: random.Random, size: int, *, thinking: bool | None = None) -> Chat:
    """Tools, and turns that use them until about ``size`` tokens are reached."""
    thinking = draw_thinking(rng, thinking)
    most = max(1, min(8, size // 120))
    offered = offer(rng, rng.randint(1, most))
    dialogue = _Dialogue(rng, offered, thinking=thinking)
    schemas = (f"{tool.tool.name}{tool.tool.description}{tool.tool.parameters}" for tool in offered)
    rest = size - sum(map(num_tokens, schemas))
    while True:
        form = rng.random()
        if form < 0.74:
            dialogue.request()
        elif form < 0.8:
            dialogue.failure()
        elif form < 0.88:
            dialogue.talk()
        elif form < 0.94 and len(dialogue.messages) > 1:
            dialogue.thanks()
        else:
            dialogue.missing()
        spent = sum(num_tokens(message["content"]) + 60 for message in dialogue.messages)
        if spent > rest or rng.random() < 0.1:
            break
    messages = dialogue.messages
    if rng.random() < 0.4:
        messages = [system(rng.choice(_SYSTEMS)), *messages]
    return Chat(
        "tool_calls",
        messages,
        wanted=dialogue.wanted,
        tools=tuple(tool.tool for tool in offered),
        thinking=thinking,
        reasoning_effort=draw_effort(rng, thinking),
    )
