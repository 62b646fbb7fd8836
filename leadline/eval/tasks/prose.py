"""Prose without meaning, to hide facts in: a sentence is subject, predicate and circumstance."""

from __future__ import annotations

import random
import re
from string import Formatter

from leadline.eval.tasks import words
from leadline.eval.tasks.family import num_tokens

_SLOTS = {
    "adj": words.ADJECTIVES,
    "colour": words.COLOURS,
    "obj": words.OBJECTS,
    "obj2": words.OBJECTS,
    "animal": words.ANIMALS,
    "food": words.FOODS,
    "place": words.PLACES,
    "job": words.JOBS,
    "job2": words.JOBS,
    "name": words.FIRST_NAMES,
    "name2": words.FIRST_NAMES,
    "city": words.CITIES,
    "city2": words.CITIES,
    "country": words.COUNTRIES,
    "month": words.MONTHS,
    "day": words.WEEKDAYS,
    "language": words.LANGUAGES,
    "material": words.MATERIALS,
    "subject": words.SUBJECTS,
    "verb": words.VERBS,
    "adv": words.ADVERBS,
}

_SUBJECTS = (
    "{name}",
    "the {job}",
    "the {adj} {job}",
    "an old friend of {name2}",
    "the {job} from {city}",
    "everybody in the {place}",
    "a group of people from {country}",
    "the {animal} of the {job}",
    "a {colour} {animal}",
    "nobody in {city}",
    "the family of {name2}",
    "the new owner of the {place}",
    "one of the visitors",
    "a student of {subject}",
    "the youngest {job} of the town",
    "{name} and {name2}",
    "some people",
    "the {job} and the {job2}",
)
_PREDICATES = (
    "liked the {adj} {obj}",
    "wanted to {verb} the {obj}",
    "never saw the {colour} {obj} again",
    "talked about {subject}",
    "walked to the {place}",
    "waited near the {adj} {place}",
    "had to {verb} a {obj} made of {material}",
    "cooked {food} with {food}",
    "wrote a letter about {subject}",
    "read a book on {subject}",
    "travelled from {city} to {city2}",
    "learnt {language}",
    "asked for {food} and {food}",
    "remembered the {place} of {city}",
    "said that the {obj} was {adj}",
    "thought that the {obj} and the {obj2} were {adj}",
    "forgot to {verb} the {obj}",
    "decided to {verb} the {adj} {obj2}",
    "looked at the {animal} in the {place}",
    "fed the {animal} some {food}",
    "told a story about a {animal} and a {adj} {obj}",
    "made a {obj} of {material}",
    "planned a trip to {country}",
    "stayed in the {place}",
    "bought {food} at the market of {city}",
    "sang a song in {language}",
    "painted a picture of the {place}",
    "did not know where the {obj} was",
    "heard a {adj} sound behind the {place}",
    "worked {adv}",
    "spoke {adv} to the {job2}",
    "found the work of a {job2} {adj}",
    "explained how to {verb} a {obj}",
    "believed that {subject} was more useful than {subject}",
    "put the {obj} next to the {colour} {obj2}",
    "helped the {job2} to {verb} the {obj}",
    "came back with a {adj} {obj}",
    "took part in a meeting on {subject}",
    "called the {place} {adj} and {adj}",
    "dreamt of a {colour} {animal}",
)
_CIRCUMSTANCES = (
    "",
    "",
    "",
    "on {day}",
    "in {month}",
    "in the {place}",
    "near {city}",
    "with {name2}",
    "for many years",
    "before the rain came",
    "after a long walk",
    "while the {animal} slept",
    "because it was {day}",
    "although the {place} was closed",
    "without a word",
    "as the people of {country} do",
    "until the end of {month}",
    "when the weather was fine",
    "in spite of the {adj} weather",
    "during the {adj} season",
)
_OPENERS = (
    *("" for _ in range(12)),
    "Later, ",
    "In those days, ",
    "On {day}, ",
    "That year, ",
    "In {country}, ",
    "Every {month}, ",
    "Once, ",
    "As {name2} said, ",
    "Near the {place}, ",
    "At first, ",
)
_WHOLE = (
    "The {place} of {city} is {adj} and {adj}.",
    "There was a {adj} {obj} in the {place}.",
    "It was {adv} said that a {animal} brings luck.",
    "Most people in {country} like {food}.",
    "A {obj} made of {material} lasts longer than one made of {material}.",
    "In {month} the days in {city} are {adj}.",
    "Why would a {job} need a {adj} {obj}?",
    "Few things are as {adj} as a {colour} {obj}.",
    "The road to the {place} was {adj}.",
    "Nothing else happened on {day}.",
    "The study of {subject} begins with simple questions.",
    "{country} and {country} trade {food} and {material}.",
    "The {animal} is smaller than the {adj} {animal}.",
    "Without {material} there would be no {obj}.",
)


def _compiled(template: str) -> list[tuple[str, list[str] | None]]:
    """Literal pieces, each with the list that the next word is drawn from."""
    parsed = Formatter().parse(template)
    return [(text, _SLOTS[name] if name is not None else None) for text, name, _, _ in parsed]


_Template = list[tuple[str, list[str] | None]]
_PARTS = [
    [_compiled(template) for template in part]
    for part in (_OPENERS, _SUBJECTS, _PREDICATES, _CIRCUMSTANCES)
]
_WHOLES = [_compiled(template) for template in _WHOLE]


def _fill(rng: random.Random, template: _Template) -> str:
    pieces = []
    for text, choices in template:
        pieces.append(text)
        if choices is not None:
            pieces.append(choices[int(rng.random() * len(choices))])
    return _A_VOWEL.sub("an ", "".join(pieces))


_A_VOWEL = re.compile(r"\ba (?=[aeiou])")


def sentence(rng: random.Random) -> str:
    """One sentence; it holds no number, so no fact is hidden in it by chance."""
    if rng.random() < 0.15:
        return words.capital(_fill(rng, rng.choice(_WHOLES)))
    opener, subject, predicate, circumstance = (
        _fill(rng, rng.choice(templates)) for templates in _PARTS
    )
    end = f" {circumstance}." if circumstance else "."
    return words.capital(f"{opener}{subject} {predicate}{end}")


def filler(rng: random.Random, size: int) -> str:
    """Paragraphs of about ``size`` tokens: the default ``Filler``."""
    sentences: list[str] = []
    while size > 0:
        text = sentence(rng)
        size -= num_tokens(text)
        sentences.append(text + ("\n\n" if rng.random() < 0.12 else " "))
    return "".join(sentences).rstrip()
