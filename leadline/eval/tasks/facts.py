"""Facts that notes state and questions ask for; the question's wording decides the answer's form.

``What is ...?`` is answered by the bare value, ``Tell me ...`` by the sentence of the note.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from leadline.eval.tasks import words
from leadline.eval.tasks.family import num_tokens

NOT_NOTED = "That is not in the notes."
"""The answer to a question about what notes do not say."""

Draw = Callable[[random.Random], str]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fact.

    Attributes:
        key: draws what the fact is about, for ``{k}``.
        value: draws ``{v}``.
        statements: how notes say it; the first one is how an answer says it.
        short: questions that the bare value answers.
        long: questions that a sentence answers.
    """

    key: Draw
    value: Draw
    statements: tuple[str, ...]
    short: tuple[str, ...]
    long: tuple[str, ...]


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


def _attribute(name: str, key: Draw, value: Draw, owner: str = "the {name} of {k}") -> Kind:
    """The kind ``the NAME of KEY is VALUE``."""
    of = owner.replace("{name}", name)
    return Kind(
        key,
        value,
        (f"{of} is {{v}}.", f"{of}: {{v}}.", f"for {{k}}, the {name} is {{v}}."),
        (f"what is {of}?", f"{of}?", f"give me only {of}."),
        (f"tell me {of}.", f"can you tell me {of}?", f"I forgot {of}. What was it?"),
    )


def _digits(*counts: int) -> Draw:
    return lambda rng: words.digits(rng, rng.choice(counts))


def _one_of(items: list[str]) -> Draw:
    return lambda rng: rng.choice(items)


def _the_thing(rng: random.Random) -> str:
    return f"the {words.thing(rng)}"


def _person(rng: random.Random) -> str:
    return rng.choice(words.FIRST_NAMES) if rng.random() < 0.6 else words.full_name(rng)


def _phone(rng: random.Random) -> str:
    return f"{words.digits(rng, 3)}-{words.digits(rng, 4)}"


def _date(rng: random.Random) -> str:
    return f"{rng.choice(words.MONTHS)} {rng.randint(1, 28)}"


def _time(rng: random.Random) -> str:
    return f"{rng.randint(1, 23)}:{rng.randrange(0, 60, 5):02d}"


def _word_value(rng: random.Random) -> str:
    return rng.choice(words.OBJECTS) if rng.random() < 0.5 else words.coined(rng)


def _hex(rng: random.Random) -> str:
    return words.hex_id(rng, rng.choice((4, 4, 6, 8)))


def _label(rng: random.Random) -> str:
    form = rng.randrange(3)
    if form == 0:
        return words.coined(rng)
    if form == 1:
        return f"{rng.choice(words.OBJECTS)}-{rng.randint(1, 99)}"
    return f"{rng.choice('ABCDEFGHJKLMNPRSTUVWXYZ')}{words.digits(rng, 2)}"


KINDS = (
    _attribute("code", _the_thing, _digits(3, 4, 4, 5)),
    _attribute("number", _the_thing, _digits(1, 2, 3)),
    _attribute("price", _the_thing, lambda rng: f"${rng.randint(2, 999)}"),
    _attribute("weight", _the_thing, lambda rng: f"{rng.randint(2, 99)} kg"),
    _attribute("serial", _the_thing, _hex),
    _attribute("colour", _the_thing, _one_of(words.COLOURS)),
    _attribute("code", _label, _digits(3, 4, 4), "the {name} for {k}"),
    _attribute("value", _label, _digits(1, 2, 3, 4)),
    _attribute("key", _label, _hex),
    _attribute("password", _person, _word_value),
    _attribute("phone number", _person, _phone),
    _attribute("lucky number", _person, _digits(1, 2)),
    _attribute("room", _person, _digits(2, 3)),
    _attribute("birthday", _person, _date),
    _attribute("favourite food", _person, _one_of(words.FOODS)),
    _attribute("favourite animal", _person, _one_of(words.ANIMALS)),
    Kind(
        _person,
        _one_of(words.CITIES),
        ("{k} lives in {v}.", "{k} has a home in {v}.", "the home of {k} is in {v}."),
        ("where does {k} live?", "in which city does {k} live?"),
        ("tell me where {k} lives.", "can you tell me where {k} lives?"),
    ),
    Kind(
        _person,
        _one_of(words.JOBS),
        ("the job of {k} is {v}.", "{k} works as {v}.", "the job of {k}: {v}."),
        ("what is the job of {k}?", "what does {k} do for a living?"),
        ("tell me what the job of {k} is.", "can you tell me the job of {k}?"),
    ),
    Kind(
        _the_thing,
        _person,
        ("{k} belongs to {v}.", "{v} owns {k}.", "the owner of {k} is {v}."),
        ("who owns {k}?", "who is the owner of {k}?"),
        ("tell me who owns {k}.", "can you tell me whose {k} is?"),
    ),
    Kind(
        _the_thing,
        lambda rng: f"the {rng.choice(words.PLACES)}",
        ("{k} is in {v}.", "you find {k} in {v}.", "somebody put {k} in {v}."),
        ("where is {k}?", "in which place is {k}?"),
        ("tell me where {k} is.", "can you tell me where to find {k}?"),
    ),
    Kind(
        _person,
        _time,
        ("{k} arrives at {v}.", "the train of {k} comes at {v}.", "at {v}, {k} arrives."),
        ("when does {k} arrive?", "at what time does {k} arrive?"),
        ("tell me when {k} arrives.", "can you tell me when {k} arrives?"),
    ),
)


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
