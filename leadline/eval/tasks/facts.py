"""Facts that notes state and questions ask for; the question's wording decides the answer's form.

``What is ...?`` is answered by the bare value, ``Tell me ...`` by the sentence of the note.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from leadline.eval.tasks import words
from leadline.eval.tasks.family import num_tokens
from leadline.eval.tasks.kinds import KINDS, Kind

NOT_NOTED = "That is not in the notes."
"""The answer to a question about what notes do not say."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its one right answer, and the value in it that counts."""

    text: str
    answer: str
    value: str


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that a note says.

    Attributes:
        text: the words of the note.
    """

    kind: Kind
    key: str
    value: str
    text: str

    def sentence(self) -> str:
        """The fact as an answer says it."""
        return words.capital(self.kind.statements[0].format(k=self.key, v=self.value))

    def ask_for_value(self, rng: random.Random) -> str:
        """A question that the bare value answers."""
        return words.capital(rng.choice(self.kind.short).format(k=self.key))

    def ask(self, rng: random.Random) -> Question:
        """One of the ways to ask for the value; two of three want it bare."""
        if rng.random() < 0.67:
            return Question(self.ask_for_value(rng), self.value, self.value)
        text = rng.choice(self.kind.long).format(k=self.key)
        return Question(words.capital(text), self.sentence(), self.value)


def draw_fact(rng: random.Random, kind: Kind | None = None, key: str | None = None) -> Fact:
    """A fact of any kind, or of the one given, or about the key given."""
    kind = kind or rng.choice(KINDS)
    key = key or kind.key(rng)
    value = kind.value(rng)
    text = words.capital(rng.choice(kind.statements).format(k=key, v=value))
    return Fact(kind, key, value, text)


def draw_notes(rng: random.Random, size: int) -> list[Fact]:
    """Facts of about ``size`` tokens together, in which no key stands twice.

    Few kinds a note, so that keys differ by one word; about one fact in five has a key that is
    its neighbour's but for that word.
    """
    kinds = rng.sample(KINDS, rng.choice((1, 1, 2, 3, 4, 8)))
    facts: list[Fact] = []
    keys: set[str] = set()
    while size > 0 or len(facts) < 2:
        key = None
        kind = rng.choice(kinds)
        if facts and rng.random() < 0.2:
            kind, key = facts[-1].kind, _near(rng, facts[-1].key)
        fact = draw_fact(rng, kind, key)
        if fact.key in keys:
            size -= 1  # a short list of keys cannot fill every note
            continue
        keys.add(fact.key)
        facts.append(fact)
        size -= num_tokens(fact.text) + 1
    rng.shuffle(facts)
    return facts


def draw_stranger(rng: random.Random, facts: list[Fact]) -> Fact:
    """A fact that a note could hold but does not."""
    keys = {fact.key for fact in facts}
    while True:
        fact = draw_fact(rng, rng.choice(facts).kind)
        if fact.key not in keys:
            return fact


def _near(rng: random.Random, key: str) -> str:
    """A key that is easily mistaken for ``key``."""
    head, _, _ = key.rpartition(" ")
    if not head:
        return f"{key} {rng.choice(words.LAST_NAMES)}" if key in words.FIRST_NAMES else key + "2"
    if key.startswith("the "):
        return f"{head} {rng.choice(words.OBJECTS)}"
    return f"{head} {rng.choice(words.LAST_NAMES)}"
