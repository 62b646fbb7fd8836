from __future__ import annotations

import json
from pathlib import Path

import pytest

from leadline.core.errors import ConfigError
from leadline.eval import heldout
from leadline.eval.exercise import Chat
from leadline.eval.suite import PARTS, choose_parts

CHATS = [part for part in PARTS if part.family != "prose"]


@pytest.mark.parametrize("part", CHATS, ids=lambda part: part.family)
def test_exercises_follow_from_the_seed_alone(part: object) -> None:
    assert isinstance(part, type(PARTS[0]))
    few = part.exercises("quick", 0, items=1)
    assert few == part.exercises("quick", 0, items=1)
    assert few != part.exercises("quick", 1, items=1)
    num_cells, _ = part.quick
    more = part.exercises("quick", 0, items=2)
    assert few == more[::2]
    assert len(more) == 2 * num_cells
    assert all(isinstance(exercise, Chat) and any(exercise.wanted) for exercise in few) or (
        part.family == "tool_calls"
    )


def test_a_full_evaluation_has_the_studys_counts() -> None:
    counts = {part.family: len(part.cells) * part.full for part in PARTS}
    assert counts["recall"] == 5 * 2000
    assert counts["needle"] == 5 * 5 * 200
    assert counts["multi_turn"] == counts["tool_calls"] == 2000
    assert counts["word_problem"] == counts["multiple_choice"] == 4000
    assert counts["prose"] == 1000


def test_families_are_chosen_by_name_in_the_suites_order() -> None:
    chosen = choose_parts("multi_turn, recall")
    assert [part.family for part in chosen] == ["recall", "multi_turn"]
    assert choose_parts(None) == list(PARTS)
    with pytest.raises(ConfigError, match="families has 'recallx'; did you mean recall"):
        choose_parts("recallx")


def test_passages_are_all_different_and_of_about_one_length(tmp_path: Path) -> None:
    file = tmp_path / "heldout.jsonl"
    texts = [f"{i} " + "word " * 2000 for i in range(3)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    passages = heldout.passages("seed", 100, file=file)
    assert len(passages) == 3 * (10000 // heldout.PASSAGE_CHARACTERS)
    assert all(3000 < len(p.text) <= heldout.PASSAGE_CHARACTERS for p in passages)
    assert heldout.passages("seed", 2, file=file) == passages[:2]


def test_missing_prose_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name --families without prose"):
        heldout.passages("seed", 1, file=tmp_path / "none")
