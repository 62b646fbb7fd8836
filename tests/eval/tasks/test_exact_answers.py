"""Answers that can be worked out are right."""

from __future__ import annotations

import json
import random
import re

import pytest

from leadline.core.request import StructuredOutputs
from leadline.eval.exercise import Passage
from leadline.eval.tasks.json_output import json_output
from leadline.eval.tasks.multiple_choice import multiple_choice
from leadline.eval.tasks.sequences import sequences
from leadline.eval.tasks.smalltalk import smalltalk
from leadline.eval.tasks.texts import listing, quotation
from leadline.eval.tasks.word_problems import arithmetic, arithmetic_drill, word_problem
from leadline.text.grammar import content_constraint
from leadline.text.tokenizer import Tokenizer
from tests.text.grammars import Grammars

_SUM = re.compile(r"(\d+) ([-+*/]) (\d+) = (-?\d+)")


def check_sums(text: str) -> int:
    sums = _SUM.findall(text)
    for a, operator, b, result in sums:
        left, right = int(a), int(b)
        right_result = {
            "+": left + right,
            "-": left - right,
            "*": left * right,
            "/": left // right if operator == "/" else 0,
        }[operator]
        assert right_result == int(result)
        assert operator != "/" or left % right == 0
    return len(sums)


def test_steps_of_word_problems_are_right_and_lead_to_the_answer() -> None:
    for seed in range(200):
        chat = word_problem(random.Random(seed), 200, thinking=True)
        steps, answer = chat.messages[-1]["reasoning_content"], chat.messages[-1]["content"]
        assert 1 <= check_sums(steps) <= 3
        assert steps.endswith(f"= {answer}.")


def test_without_thinking_the_steps_are_in_the_answer() -> None:
    for seed in range(60):
        chat = word_problem(random.Random(seed), 200, thinking=False)
        for turn, wanted in zip(chat.turns(), chat.wanted, strict=True):
            content = chat.messages[turn]["content"]
            if chat.messages[0]["role"] == "system":
                assert content == wanted
            else:
                assert check_sums(content)
                assert content.endswith(f"The answer is {wanted}.")


def test_sums_are_right() -> None:
    passage = arithmetic_drill(random.Random(1), 3000)
    assert isinstance(passage, Passage)
    assert check_sums(passage.text) > 250
    for seed in range(60):
        chat = arithmetic(random.Random(seed), 100, thinking=True)
        assert check_sums(chat.messages[-1]["reasoning_content"]) == 1


def test_the_letter_is_that_of_the_value_in_the_note() -> None:
    for seed in range(100):
        chat = multiple_choice(random.Random(seed), 300, thinking=True)
        question, answer = chat.messages[-2]["content"], chat.messages[-1]
        options = re.findall(r"^\(?([A-D])[).:] (.*)$", question, re.MULTILINE)[-4:]
        assert [letter for letter, _ in options] == ["A", "B", "C", "D"]
        assert len({option for _, option in options}) == 4
        fact = answer["reasoning_content"].removeprefix("The note says: ").rpartition(" That is")[0]
        assert dict(options)[answer["content"]].casefold() in fact.casefold()


def test_json_answers_fit_their_schema(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer)
    kinds = set()
    for seed in range(60):
        chat = json_output(random.Random(seed), 400)
        content = chat.messages[-1]["content"]
        assert content == json.dumps(json.loads(content), ensure_ascii=False)
        form = chat.response_format
        assert form is not None
        kinds.add(form.kind)
        if form.kind == "json_schema":
            grammar = content_constraint(StructuredOutputs(json=form.schema))
            assert grammar is not None
            assert grammars.accepts(grammar, content), (form.schema, content)
    assert kinds == {"json_object", "json_schema"}


def test_json_answers_take_their_values_from_the_text() -> None:
    for seed in range(60):
        chat = json_output(random.Random(seed), 400)
        text = chat.messages[0]["content"].casefold()
        found = re.findall(r'(?:"([^"]+)"|(\d[\d.]*))(?=[,}\]])', chat.messages[-1]["content"])
        assert found
        assert all((string or number).casefold() in text for string, number in found)


@pytest.mark.parametrize(
    ("beginning", "job"),
    [
        ("Reverse", lambda items: ", ".join(reversed(items))),
        ("Count these", lambda items: str(len(items))),
        ("Put in alphabetical order", lambda items: ", ".join(sorted(items, key=str.lower))),
        ("What is the last item", lambda items: items[-1]),
        ("What is the second item", lambda items: items[1]),
        ("What is the largest number", lambda items: max(items, key=int)),
        ("Write in upper case", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_jobs_on_lists_are_done_right(beginning: str, job: object) -> None:
    seen = 0
    for seed in range(400):
        chat = sequences(random.Random(seed), 300, thinking=False)
        for turn in chat.turns():
            request, answer = chat.messages[turn - 1]["content"], chat.messages[turn]["content"]
            name, _, text = request.partition(": ")
            if name != beginning:
                continue
            seen += 1
            if callable(job):
                assert answer == job(re.split(r"[,;] | - | ", text))
            else:
                assert answer == text.upper()
    assert seen > 5


def test_closing_brackets_balance() -> None:
    pairs = {")": "(", "]": "[", "}": "{"}
    for seed in range(200):
        chat = sequences(random.Random(seed), 100, thinking=False)
        for turn in chat.turns():
            request = chat.messages[turn - 1]["content"]
            if "brackets" not in request and not request.startswith("Complete"):
                continue
            stack: list[str] = []
            for sign in request.partition(": ")[2] + chat.messages[turn]["content"]:
                if sign in pairs:
                    assert stack.pop() == pairs[sign]
                else:
                    stack.append(sign)
            assert not stack


def test_quoted_sentences_go_on_as_in_the_text() -> None:
    for seed in range(40):
        chat = quotation(random.Random(seed), 400, thinking=False)
        text = chat.messages[0]["content"]
        for turn in chat.turns():
            start = re.findall(r'"([^"]+)"', chat.messages[turn - 1]["content"])[-1]
            assert f"{start} {chat.messages[turn]['content']}" in text


def test_lists_are_of_the_note() -> None:
    for seed in range(40):
        chat = listing(random.Random(seed), 400, thinking=False)
        note = chat.messages[0]["content"].casefold()
        for turn in chat.turns():
            answer = chat.messages[turn]["content"].casefold()
            if chat.messages[turn - 1]["content"].endswith("values."):
                parts = answer.split(", ")
            else:
                parts = [line.removeprefix("- ") for line in answer.split("\n")]
            is_number = len(answer) < 3
            assert is_number or all(part in note for part in parts)


def test_small_talk_remembers_what_the_user_said() -> None:
    seen = 0
    for seed in range(300):
        chat = smalltalk(random.Random(seed), 300, thinking=False)
        for turn in chat.turns():
            answer = chat.messages[turn]["content"]
            if match := re.fullmatch(r"Your [\w ]+ is (.*)\.", answer):
                seen += 1
                said = " ".join(message["content"] for message in chat.messages[: turn - 1])
                assert match.group(1) in said
    assert seen > 20
