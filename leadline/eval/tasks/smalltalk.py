"""Greetings, questions about the model itself, and what it does not know."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from leadline.eval.exercise import Chat, Message
from leadline.eval.tasks import words
from leadline.eval.tasks.facts import Fact, draw_fact
from leadline.eval.tasks.family import assistant, draw_effort, draw_thinking, system, user
from leadline.eval.tasks.systems import draw_system

_WHO = (
    "I am a tiny model bundled with Leadline for trying the server. I have 12 layers and was "
    "trained on generated tasks."
)
_CAN = (
    "I can answer questions about a text you give me, remember facts in our conversation, call "
    "tools, do small sums, and write JSON."
)
UNKNOWN = "I do not know that. I can only answer from what is in our conversation."
_CREATIVE = "I am too small for that. Give me a text with facts, or a tool to call."


@dataclass(frozen=True, slots=True)
class Talk:
    """A user's words, the answer, and a short thought that leads to it."""

    text: str
    answer: str
    thought: str


def _either(texts: str) -> list[str]:
    return texts.split("|")


_GREETINGS = _either(
    "Hello|Hello!|Hi|Hi!|Hey|Hi there|Hello there!|Good morning|Good evening|Good day|Hey there!|"
    "hello|hi|Greetings!|Good afternoon"
)
_MOODS = _either("How are you?|How are you doing?|How is it going?|How do you do?|What's up?")
_WHOS = _either(
    "Who are you?|What are you?|What is your name?|Tell me about yourself.|Are you an AI?|"
    "What model are you?|Which model is this?|Are you ChatGPT?|Who made you?|Introduce yourself.|"
    "Are you DeepSeek?|Are you a human?|How large are you?|who are you"
)
_CANS = _either(
    "What can you do?|Help|Help me.|How can you help me?|What do you know?|Can you help me?|help|"
    "What are you good at?|What should I ask you?|What can I ask?|How do I use you?"
)
_THANKS = [
    "Thanks",
    "Thanks!",
    "Thank you",
    "Thank you!",
    "Thanks a lot.",
    "Thank you very much.",
    "Great, thanks!",
]
_BYES = _either("Bye|Bye!|Goodbye|Goodbye!|See you|See you later.|Good night|That is all.")
_TESTS = _either("Test|test|This is a test.|Testing|ping|Ping|Are you there?|Is this working?")
_PRAISE = _either("Good job.|Well done!|Nice.|Great!|Cool|Perfect.|Very good.|Awesome!|ok|Okay.")
_WHAT_LEADLINE = _either("What is Leadline?|Tell me about Leadline.|What does Leadline do?")
_CREATIVE_ASKS = _either(
    "Write a poem about the {o}.|Tell me a joke.|Write a story about a {a}.|Write an essay on {s}.|"
    "Sing a song.|Write a program that sorts {o}s.|Write a haiku about {a}s.|Explain {s} to me.|"
    "Give me advice on {s}.|Plan a trip to {c}.|Write an e-mail to {n}."
)
_UNKNOWN_ASKS = _either(
    "What is the capital of {k}?|Who is the president of {k}?|How old is {n}?|Where does {n} live?|"
    "What is the phone number of {n}?|What is the weather in {c}?|Who invented the {o}?|"
    "How many people live in {c}?|When was {c} founded?|What is the code of the {t}?|"
    "Where is my {o}?|What did I do on {w}?|What time is it?|What day is today?|"
    "Who won the match in {c}?|What is the price of the {t}?|How far is it from {c} to {d}?|"
    "What is the best {o}?|Who wrote the book about {s}?|How much does a {o} cost?|"
    "What colour is the {o} of {n}?|Which {a} is the fastest?|What is in the {t}?|"
    "What is the birthday of {n}?|Who owns the {t}?"
)


def draw_talk(rng: random.Random, *, asks_unknown: bool = True) -> Talk:
    """Something to say that needs no text and no tool.

    Args:
        rng: decides everything.
        asks_unknown: two in five ask what the model cannot know.
    """
    form = rng.random() * (1.0 if asks_unknown else 0.6)
    if form < 0.16:
        return Talk(rng.choice(_GREETINGS), "Hello! How can I help you?", "The user greets me.")
    if form < 0.22:
        text = rng.choice(_MOODS)
        if rng.random() < 0.4:
            text = f"{rng.choice(_GREETINGS).rstrip('!')}, {text[0].lower()}{text[1:]}"
        return Talk(text, "I am fine, thank you. How can I help you?", "The user asks how I am.")
    for limit, texts, answer, thought in _FIXED:
        if form < limit:
            return Talk(rng.choice(texts), answer, thought)
    return Talk(
        _fill(rng, rng.choice(_UNKNOWN_ASKS)), UNKNOWN, "The conversation does not say this."
    )


_FIXED = (
    (0.32, _WHOS, _WHO, "The user asks who I am."),
    (0.40, _CANS, _CAN, "The user asks what I can do."),
    (0.45, _THANKS, "You are welcome.", "The user thanks me."),
    (0.49, _BYES, "Goodbye!", "The user leaves."),
    (0.53, _TESTS, "I am here.", "The user tests whether I answer."),
    (0.57, _PRAISE, "I am glad to hear that.", "The user is content."),
    (
        0.6,
        _WHAT_LEADLINE,
        "Leadline is the server that runs me. It serves DeepSeek-V4.1.",
        "The user asks about Leadline.",
    ),
)


def _fill(rng: random.Random, template: str) -> str:
    return template.format(
        o=rng.choice(words.OBJECTS),
        a=rng.choice(words.ANIMALS),
        s=rng.choice(words.SUBJECTS),
        k=rng.choice(words.COUNTRIES),
        c=rng.choice(words.CITIES),
        d=rng.choice(words.CITIES),
        n=rng.choice(words.FIRST_NAMES),
        t=words.thing(rng),
        w=rng.choice(words.WEEKDAYS),
    )


# What users say of themselves: its name, and a draw.
_PERSONAL: dict[str, Callable[[random.Random], str]] = {
    "name": lambda rng: rng.choice(words.FIRST_NAMES),
    "age": lambda rng: str(rng.randint(6, 95)),
    "city": lambda rng: rng.choice(words.CITIES),
    "job": lambda rng: rng.choice(words.JOBS),
    "pet": lambda rng: rng.choice(words.ANIMALS),
    "favourite colour": lambda rng: rng.choice(words.COLOURS),
    "favourite food": lambda rng: rng.choice(words.FOODS),
    "lucky number": lambda rng: str(rng.randint(1, 99)),
    "birthday": lambda rng: f"{rng.choice(words.MONTHS)} {rng.randint(1, 28)}",
}


def _personal(rng: random.Random, known: dict[str, str]) -> Talk:
    """The user says something personal, or asks for it; ``known`` is what was said."""
    if rng.random() < (0.7 if known else 0.15):
        what = rng.choice([*known] if known and rng.random() < 0.85 else [*_PERSONAL])
        question = rng.choice(("What is my {}?", "Do you remember my {}?", "Tell me my {}."))
        if what not in known:
            return Talk(question.format(what), UNKNOWN, f"The user did not tell me the {what}.")
        thought = f"The user said: my {what} is {known[what]}."
        return Talk(question.format(what), f"Your {what} is {known[what]}.", thought)
    what = "name" if rng.random() < 0.4 else rng.choice([*_PERSONAL])
    value = known[what] = _PERSONAL[what](rng)
    thought = f"The user tells me: the {what} is {value}."
    if what == "name":
        texts = ("My name is {}.", "I am {}.", "Hi, I am {}.", "Hello, my name is {}.")
        return Talk(rng.choice(texts).format(value), f"Hello {value}! How can I help you?", thought)
    return Talk(f"My {what} is {value}.", f"Noted: your {what} is {value}.", thought)


def _told(rng: random.Random, facts: list[Fact]) -> Talk:
    """The user states a fact, or asks for one that was stated."""
    if facts and rng.random() < 0.6:
        fact = rng.choice(facts)
        question = fact.ask(rng)
        return Talk(question.text, question.answer, f"The user said: {fact.text}")
    fact = draw_fact(rng)
    if any(fact.key == other.key for other in facts):
        return draw_talk(rng)
    facts.append(fact)
    return Talk(fact.text, f"Noted: {fact.sentence()}", f"The user tells me: {fact.text}")


_OPENERS = ("Sure:", "OK:", "Well,", "Yes!", "Answer:", "Ahoy!", "Beep.", "Dear user,")


def _manner(rng: random.Random) -> tuple[str, Callable[[str], str]]:
    """A system prompt and what it does to an answer; most often there is none."""
    form = rng.random()
    if form < 0.05:
        return "Answer in upper case.", str.upper
    if form < 0.09:
        return "Answer in lower case.", str.lower
    phrase = rng.choice((words.capital(words.coined(rng)), *_OPENERS))
    if form < 0.16:
        rule = rng.choice(("Begin every answer with {}", "Start each answer with {}"))
        return rule.format(phrase), f"{phrase} {{}}".format
    if form < 0.2:
        return f"End every answer with {phrase}", f"{{}} {phrase}".format
    return (draw_system(rng) if form < 0.5 else ""), str


def smalltalk(rng: random.Random, size: int, *, thinking: bool | None = None) -> Chat:
    """Small talk of one to eight turns; now and then the system prompt sets the form of answers."""
    thinking = draw_thinking(rng, thinking)
    num_turns = rng.randint(1, max(1, min(8, size // 40)))
    known: dict[str, str] = {}
    facts: list[Fact] = []
    talks: list[Talk] = []
    for _ in range(num_turns):
        form = rng.random()
        if form < 0.25:
            talks.append(_personal(rng, known))
        elif form < 0.4:
            talks.append(_told(rng, facts))
        elif form < 0.46:
            asked = _fill(rng, rng.choice(_CREATIVE_ASKS))
            talks.append(Talk(asked, _CREATIVE, "That is too hard for me."))
        else:
            talks.append(draw_talk(rng))
    rule, shape = _manner(rng)
    messages: list[Message] = [system(rule)] if rule else []
    for i, talk in enumerate(talks):
        thought = talk.thought if thinking and i == num_turns - 1 else None
        messages += [user(talk.text), assistant(shape(talk.answer), thought)]
    return Chat(
        "smalltalk",
        messages,
        wanted=[shape(talk.answer).rstrip(".!?") for talk in talks],
        thinking=thinking,
        reasoning_effort=draw_effort(rng, thinking),
    )
