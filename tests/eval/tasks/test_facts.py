"""Facts of notes, and those that notes do not hold."""

from __future__ import annotations

import random

from leadline.eval.tasks import words
from leadline.eval.tasks.facts import draw_fact, draw_stranger
from leadline.eval.tasks.kinds import KINDS


def test_a_stranger_is_found_where_a_note_holds_every_key_of_its_kind() -> None:
    rng = random.Random(0)
    meetings = next(kind for kind in KINDS if kind.key(rng).startswith("the meeting on"))
    facts = [draw_fact(rng, meetings, f"the meeting on {subject}") for subject in words.SUBJECTS]
    stranger = draw_stranger(rng, facts)
    assert stranger.key not in {fact.key for fact in facts}
