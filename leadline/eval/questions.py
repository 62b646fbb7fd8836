"""Exercises as ids: what the engine is given before each answer, and the answer that is right."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from leadline.eval.exercise import Chat, Exercise, Passage
from leadline.eval.scoring import Expectation
from leadline.text.chat import AnswerStart, ChatPrompt
from leadline.text.encoding import ChatEncoder

# Of a passage: the model continues it from here on, as it continues a prompt.
PROMPT_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Question:
    """One answer that is wanted.

    Attributes:
        cell: what results are grouped by within the family.
        gold: ids of the right answer, its end included.
        expectation: None where nothing is judged: the turn only leads to the next.
        num_bytes: of the right answer where bits per byte are counted, else 0.
    """

    cell: str
    prompt: ChatPrompt
    gold: tuple[int, ...]
    expectation: Expectation | None
    num_bytes: int = 0

    @property
    def is_measured(self) -> bool:
        return self.expectation is not None or bool(self.num_bytes)


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Questions that come one after the other, each with the right answers before it."""

    family: str
    number: int
    questions: tuple[Question, ...]


def as_dialogue(exercise: Exercise, number: int, encoder: ChatEncoder) -> Dialogue:
    """The questions of an exercise; ``number`` tells it from others."""
    if isinstance(exercise, Passage):
        questions = [_continuation(exercise, encoder)]
    else:
        turns = range(len(exercise.turns()))
        questions = [_question(exercise, turn, encoder) for turn in turns]
        while questions and not questions[-1].is_measured:
            questions.pop()
    return Dialogue(exercise.family, number, tuple(questions))


def _question(chat: Chat, number: int, encoder: ChatEncoder) -> Question:
    turns = chat.turns()
    prompt = encoder.encode(chat.before(turns[number]))
    expectation = Expectation.of_turn(chat, number)
    return Question(
        cell=cell_of(chat, number, expectation),
        prompt=prompt,
        gold=_gold(chat, turns[number], encoder),
        expectation=expectation if expectation.is_judged else None,
    )


def cell_of(chat: Chat, number: int, expectation: Expectation) -> str:
    """What the results of an assistant's turn are grouped by; turns count from 0."""
    if chat.tools:
        return "calls" if expectation.calls else "answers"
    return f"turn {number + 1}" if len(chat.turns()) > 1 else chat.cell or "all"


def _gold(chat: Chat, turn: int, encoder: ChatEncoder) -> tuple[int, ...]:
    """What the model should generate for message ``turn``, its reasoning included."""
    # Otherwise the reasoning of a finished turn is left out, and this one is finished here.
    before = dataclasses.replace(chat.before(turn), drop_thinking=False)
    after = dataclasses.replace(
        before, messages=chat.messages[: turn + 1], add_generation_prompt=False
    )
    start, whole = encoder.encode(before).token_ids, encoder.encode(after).token_ids
    assert whole[: len(start)] == start, f"a turn of {chat.family} does not follow its prompt"
    return whole[len(start) :]


def _continuation(passage: Passage, encoder: ChatEncoder) -> Question:
    tokenizer = encoder.tokenizer
    ids = tokenizer.encode_prompt(passage.text)
    cut = max(1, int(len(ids) * PROMPT_SHARE))
    return Question(
        cell="all",
        prompt=ChatPrompt(tuple(ids[:cut]), AnswerStart.PLAIN, thinking=False),
        gold=tuple(ids[cut:]),
        expectation=None,
        num_bytes=len(tokenizer.token_bytes(ids[cut:])),
    )


def fits(dialogue: Dialogue, max_model_len: int) -> bool:
    """Whether each of a dialogue's prompts leaves room for an answer."""
    return all(
        len(question.prompt.token_ids) + answer_limit(question) <= max_model_len
        for question in dialogue.questions
    )


def answer_limit(question: Question) -> int:
    """Tokens that a model may take for its own answer."""
    return len(question.gold) * 3 // 2 + 16
