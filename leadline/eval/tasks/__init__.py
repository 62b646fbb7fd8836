"""Generators of exercises: what the bundled model learns, and what evaluation asks of a model."""

from __future__ import annotations

from leadline.eval.tasks.family import Family, Filler
from leadline.eval.tasks.json_output import json_output
from leadline.eval.tasks.mixed import mixed
from leadline.eval.tasks.multi_turn import multi_turn
from leadline.eval.tasks.multiple_choice import multiple_choice
from leadline.eval.tasks.needle import needle, two_hop
from leadline.eval.tasks.prose import filler
from leadline.eval.tasks.recall import recall, recall_dense, recall_quiz, recall_turns
from leadline.eval.tasks.sequences import sequences
from leadline.eval.tasks.smalltalk import smalltalk
from leadline.eval.tasks.texts import listing, quotation
from leadline.eval.tasks.tool_calls import tool_calls
from leadline.eval.tasks.word_problems import arithmetic, arithmetic_drill, word_problem

FAMILIES = {
    family.name: family
    for family in (
        Family("recall_dense", recall_dense, (64, 1024), "pairs, then the same pairs again"),
        Family("recall", recall, (128, 8192), "notes and questions about them"),
        Family("recall_quiz", recall_quiz, (128, 2048), "notes and a list of questions"),
        Family("recall_turns", recall_turns, (128, 8192), "a note with every question"),
        Family("needle", needle, (128, 8192), "facts hidden in prose", has_filler=True),
        Family("two_hop", two_hop, (128, 4096), "two facts to be joined", has_filler=True),
        Family("multi_turn", multi_turn, (300, 4096), "notes that change over the turns"),
        Family("mixed", mixed, (160, 2048), "several chats, one behind the other"),
        Family("tool_calls", tool_calls, (150, 1500), "tools, calls, results, answers"),
        Family("word_problem", word_problem, (60, 300), "sums in words, solved step by step"),
        Family("arithmetic", arithmetic, (30, 250), "sums"),
        Family("arithmetic_drill", arithmetic_drill, (30, 250), "sums in a row"),
        Family("multiple_choice", multiple_choice, (100, 800), "one of four options"),
        Family("sequences", sequences, (30, 500), "copy, reverse, sort, count, close brackets"),
        Family("json_output", json_output, (60, 600), "facts as a JSON object"),
        Family("listing", listing, (100, 700), "repeat, list or count sentences"),
        Family("quotation", quotation, (128, 4096), "go on with a sentence", has_filler=True),
        Family("smalltalk", smalltalk, (30, 300), "greetings, and what the model is"),
    )
}
"""All families by name."""

__all__ = ["FAMILIES", "Family", "Filler", "filler"]
