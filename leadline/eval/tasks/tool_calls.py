"""Conversations with tools: single and parallel calls, chains, failures, and turns without a call.

With tools in the prompt past reasoning stays in it, so with thinking every turn is reasoned.
"""

from __future__ import annotations

import json
import random

from leadline.eval.exercise import Chat, Message
from leadline.eval.tasks import words
from leadline.eval.tasks.facts import draw_fact
from leadline.eval.tasks.family import (
    assistant,
    draw_effort,
    draw_thinking,
    num_tokens,
    system,
    user,
)
from leadline.eval.tasks.smalltalk import draw_talk
from leadline.eval.tasks.systems import draw_system
from leadline.eval.tasks.tools import BLUEPRINTS
from leadline.eval.tasks.tools.in_use import (
    Call,
    Offered,
    draw_call,
    links_from,
    offer,
    polite,
    settle,
)

_AT_ONCE = (" ", " ", " Also: ", "\n", " And: ")
_IN_TURN = (" Then: ", " And then: ", " After that: ", "\nThen: ")
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
        """A request, the calls that it needs, their results, the answer.

        The words between two wishes tell whether they are called at once or in turn.
        """
        form = self.rng.random()
        if form < 0.55:
            call = self._draw()
            self._ask(polite(self.rng, call.request))
            self._call([call])
            self._tell([call])
        elif form < 0.75:
            calls, request = self._alike()
            self._ask(polite(self.rng, request))
            self._call(calls)
            self._tell(calls)
        elif form < 0.88:
            calls = [self._draw() for _ in range(self.rng.choice((2, 2, 3)))]
            self._ask(self.rng.choice(_AT_ONCE).join(call.request for call in calls))
            self._call(calls)
            self._tell(calls)
        else:
            calls = [self._draw() for _ in range(2)]
            self._ask(self.rng.choice(_IN_TURN).join(call.request for call in calls))
            self._call(calls[:1])
            self._call(calls[1:])
            self._tell(calls)

    def chain(self) -> None:
        """A call that needs what another one returned."""
        links = [link for one in self.offered for link in links_from(one, self.offered)]
        if not links:
            self.request()
            return
        link = self.rng.choice(links)
        first = draw_call(self.rng, link.source)
        value = json.loads(first.result)[link.field]
        words_for_it = f"the {link.field.replace('_', ' ')} that it returns"
        second = draw_call(self.rng, link.target, fixed={link.argument: (value, words_for_it)})
        self._ask(first.request + self.rng.choice(_IN_TURN) + second.request)
        self._call([first])
        self._call([second])
        self._tell([first, second])

    def failure(self) -> None:
        """The tool fails, and the user is told why."""
        call, error = self._draw(), self.rng.choice(_ERRORS)
        self._ask(polite(self.rng, call.request))
        self._call([call], result=json.dumps({"error": error}))
        self._say(f"The tool failed: {error}.", f"{call.name} failed with {error}.", error)

    def talk(self) -> None:
        """Nothing that a tool is for."""
        if self.rng.random() < 0.6:
            talk = draw_talk(self.rng, asks_unknown=False)
            self._ask(talk.text)
            thought = f"{talk.thought} No tool is needed."
            self._say(talk.answer, thought, talk.answer.rstrip(".!?"))
            return
        fact = draw_fact(self.rng)
        question = fact.ask(self.rng)
        self._ask(f"{fact.text} {question.text}")
        thought = f"The user said: {fact.text} No tool is needed."
        self._say(question.answer, thought, question.value)

    def thanks(self) -> None:
        """The user is content."""
        self._ask(self.rng.choice(_THANKS))
        self._say("You are welcome.", "The user thanks me. No tool is needed.", "welcome")

    def missing(self) -> None:
        """A request that none of the tools is for."""
        names = {tool.tool.name for tool in self.offered}
        descriptions = {tool.blueprint.description for tool in self.offered}
        other = None
        while other is None or other.description in descriptions or names & {*other.names}:
            other = self.rng.choice(BLUEPRINTS)
        request = draw_call(self.rng, settle(self.rng, other)).request
        self._ask(polite(self.rng, request))
        self._say(_NO_TOOL, "None of my tools can do this.", "no tool")

    def _draw(self) -> Call:
        spelled_out = self.rng.random() < 0.3
        return draw_call(self.rng, self.rng.choice(self.offered), spelled_out=spelled_out)

    def _alike(self) -> tuple[list[Call], str]:
        """Calls of one tool with different values, asked for in one sentence."""
        rng = self.rng
        simple = [tool for tool in self.offered if tool.blueprint.has_one_plain_argument]
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

    def _ask(self, request: str) -> None:
        self.messages.append(user(request))

    def _tell(self, calls: list[Call]) -> None:
        told = [f"{call.name} returned {call.result}" for call in calls]
        self._say("\n".join(call.answer for call in calls), "\n".join(told), calls[-1].value)

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
        if form < 0.62:
            dialogue.request()
        elif form < 0.74:
            dialogue.chain()
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
        messages = [system(draw_system(rng, has_tools=True)), *messages]
    return Chat(
        "tool_calls",
        messages,
        wanted=dialogue.wanted,
        tools=tuple(tool.tool for tool in offered),
        thinking=thinking,
        reasoning_effort=draw_effort(rng, thinking),
    )
