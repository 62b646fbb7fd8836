"""A notebook kept over many turns: facts are added, corrected, deleted and asked for."""

from __future__ import annotations

import random

from leadline.eval.exercise import Chat, Message
from leadline.eval.tasks.facts import NOT_NOTED, Fact, draw_fact, draw_notes
from leadline.eval.tasks.family import assistant, draw_effort, draw_thinking, system, user
from leadline.eval.tasks.kinds import KINDS
from leadline.eval.tasks.recall import join_facts, quote
from leadline.eval.tasks.systems import draw_system

_OPENINGS = ("Here are my notes.", "Please keep these notes.", "Remember this:", "My notes:")
_CORRECTIONS = (
    "Correction: {fact}",
    "I was wrong. {fact}",
    "That has changed: {fact}",
    "Update: {fact}",
    "Please change this: {fact}",
)
_ADDITIONS = ("Please add: {fact}", "Also note: {fact}", "One more: {fact}", "New: {fact}")
_DELETIONS = ("Please forget {k}.", "Delete what you know of {k}.", "Remove {k} from the notes.")


class _Notebook:
    """The state that a conversation has reached, and its messages.

    Attributes:
        facts: what holds now, by key.
        asked: keys that a question was about.
        last: the fact that the latest turn was about.
    """

    def __init__(self, rng: random.Random, facts: list[Fact]) -> None:
        self.rng = rng
        self.facts = {fact.key: fact for fact in facts}
        self.asked: list[str] = []
        self.last: Fact | None = None
        self.deleted: list[Fact] = []
        self.messages: list[Message] = []
        self.wanted: list[str | None] = []
        self.quotes: list[str] = []

    def say(
        self, request: str, answer: str, wanted: str, quote: str, about: Fact | None = None
    ) -> None:
        """Add a turn; ``quote`` is what reasoning would say."""
        self.last = about
        self.messages += [user(request), assistant(answer)]
        self.wanted.append(wanted)
        self.quotes.append(quote)

    def ask(self) -> None:
        """A question about what is there; one in three is about something met before."""
        rng = self.rng
        if self.deleted and rng.random() < 0.3:
            fact = rng.choice(self.deleted)
            self.say(fact.ask(rng).text, NOT_NOTED, NOT_NOTED, "The user deleted this.")
            return
        met = [key for key in self.asked if key in self.facts]
        key = rng.choice(met) if met and rng.random() < 0.33 else rng.choice([*self.facts])
        fact = self.facts[key]
        question = fact.ask(rng)
        self.asked.append(key)
        self.say(question.text, question.answer, question.value, quote(fact), fact)

    def correct(self) -> None:
        """A new value for a key; most often one that was asked for."""
        rng = self.rng
        met = [key for key in self.asked if key in self.facts]
        key = rng.choice(met) if met and rng.random() < 0.6 else rng.choice([*self.facts])
        fact = draw_fact(rng, self.facts[key].kind, key)
        self.facts[key] = fact
        self.asked.append(key)
        self._note(rng.choice(_CORRECTIONS), fact)

    def add(self) -> None:
        """A fact that was not there."""
        kind = self.rng.choice([fact.kind for fact in self.facts.values()])
        fact = draw_fact(self.rng, kind if self.rng.random() < 0.7 else self.rng.choice(KINDS))
        if fact.key in self.facts:
            self.ask()
            return
        self.facts[fact.key] = fact
        self.asked.append(fact.key)
        self._note(self.rng.choice(_ADDITIONS), fact)

    def delete(self) -> None:
        """A key is forgotten; asked for, it is unknown."""
        if len(self.facts) < 3:
            self.ask()
            return
        fact = self.facts.pop(self.rng.choice([*self.facts]))
        self.deleted = [fact]
        request = self.rng.choice(_DELETIONS).format(k=fact.key)
        self.say(request, "Deleted.", "Deleted", "The user wants this deleted.")

    def recount(self) -> None:
        """What the value was that was told last."""
        fact = self.last
        if fact is None:
            self.ask()
            return
        request = self.rng.choice(("Say that again, please.", "What was that?", "Repeat that."))
        self.say(request, fact.sentence(), fact.value, f"We spoke of this: {fact.text}", fact)

    def _note(self, template: str, fact: Fact) -> None:
        request = template.format(fact=fact.text)
        self.say(request, f"Noted: {fact.sentence()}", fact.value, f"New: {fact.text}", fact)


def multi_turn(
    rng: random.Random,
    size: int,
    *,
    thinking: bool | None = None,
    num_turns: int | None = None,
) -> Chat:
    """Notes, then turns that ask, correct, add and delete.

    Only the last answer is reasoned: that is how a prompt without tools shows a past turn.

    Args:
        rng: decides everything.
        size: tokens of the conversation.
        thinking: whether the last answer is reasoned.
        num_turns: turns of the user; left out it is 3 to 8.
    """
    thinking = draw_thinking(rng, thinking)
    num_turns = num_turns or rng.randint(3, 8)
    facts = draw_notes(rng, max(30, size - 30 * num_turns))
    notebook = _Notebook(rng, facts)
    note = f"{rng.choice(_OPENINGS)}\n{join_facts(rng, facts)}"
    notebook.say(note, "Noted.", "Noted", "The user gives me notes to keep.")
    steps = (
        notebook.ask,
        notebook.ask,
        notebook.ask,
        notebook.correct,
        notebook.correct,
        notebook.add,
        notebook.delete,
        notebook.recount,
    )
    for turn in range(1, num_turns):
        rng.choice(steps if turn < num_turns - 1 else steps[:3])()
    messages = notebook.messages
    if thinking:
        messages[-1] = assistant(messages[-1]["content"], notebook.quotes[-1])
    if rng.random() < 0.4:
        messages = [system(draw_system(rng)), *messages]
    return Chat(
        "multi_turn",
        messages,
        wanted=notebook.wanted,
        cell=str(num_turns),
        thinking=thinking,
        reasoning_effort=draw_effort(rng, thinking),
    )
