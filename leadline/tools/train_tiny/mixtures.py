"""The mixtures that recipes train on: families and their shares of the tokens."""

from __future__ import annotations

from leadline.eval.tasks import FAMILIES
from leadline.tools.train_tiny.mixture import Mixture, Part


def _mixture(**shares: float) -> Mixture:
    """Shares in percent; sizes are those that a family's exercises make sense at."""
    sizes = {name: family.sizes for name, family in FAMILIES.items()}
    sizes |= {"prose": (256, 8192), "glosses": (20, 200)}
    return {name: Part(share, sizes[name]) for name, share in shares.items()}


# The association circuit forms where nearly every token has to be recalled (study 4.1).
EARLY = _mixture(
    prose=18,
    glosses=3,
    recall_dense=18,
    recall=9,
    recall_quiz=6,
    needle=4,
    two_hop=3,
    quotation=3,
    multi_turn=7,
    tool_calls=11,
    json_output=3,
    word_problem=5,
    arithmetic=1,
    arithmetic_drill=3,
    multiple_choice=3,
    sequences=3,
    listing=1,
    mixed=2,
    smalltalk=1,
)
LATE = _mixture(
    prose=18,
    glosses=3,
    recall_dense=4,
    recall=10,
    recall_quiz=4,
    needle=6,
    two_hop=4,
    quotation=3,
    multi_turn=12,
    tool_calls=14,
    json_output=3,
    word_problem=7,
    arithmetic=1,
    arithmetic_drill=1,
    multiple_choice=4,
    sequences=3,
    listing=1,
    mixed=3,
    smalltalk=1,
)
# To go on with, from a model that has the forms but is not sure of the facts: questions that stand
# before their note, notes with much alike, two facts to be joined, options to be compared.
WEAK = _mixture(
    prose=13,
    glosses=1,
    recall_dense=4,
    recall=13,
    recall_turns=16,
    recall_quiz=10,
    needle=5,
    two_hop=7,
    quotation=4,
    multi_turn=7,
    tool_calls=6,
    json_output=2,
    word_problem=3,
    arithmetic=0.5,
    arithmetic_drill=0.5,
    multiple_choice=8,
    sequences=5,
    listing=3,
    mixed=4,
    smalltalk=0.5,
)
LAST = _mixture(
    prose=16,
    glosses=2,
    recall_dense=3,
    recall=13,
    recall_turns=12,
    recall_quiz=7,
    needle=6,
    two_hop=6,
    quotation=4,
    multi_turn=9,
    tool_calls=9,
    json_output=2.5,
    word_problem=4,
    arithmetic=0.5,
    arithmetic_drill=0.5,
    multiple_choice=6,
    sequences=4,
    listing=2,
    mixed=4,
    smalltalk=1,
)
# A small vocabulary makes chats long: passages only, then the shortest chats.
PASSAGES = _mixture(prose=25, recall_dense=65, arithmetic_drill=10)
SHORT = {**PASSAGES, "recall": Part(20, (128, 192))}
