"""From what a request asks of its answer to the grammars that the engine enforces (5.2, 9.4).

Only cheap checks happen here: the engine compiles grammars, where one that is too complex does no
harm, and says what is wrong with those that do not compile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from leadline.core.errors import BadRequest
from leadline.core.request import Constraint, SamplingParams, StructuredOutputs, ThinkingBudget
from leadline.text.chat import AnswerStart, ChatPrompt
from leadline.text.json_schema import check_size, invalid, json_rule, load_schema
from leadline.text.markers import DSML, THINK_END
from leadline.text.profiles import DsmlTags
from leadline.text.structural_tag import structural_tag_grammar
from leadline.text.tokenizer import Tokenizer
from leadline.text.tool_grammar import ToolBlock

# Its translation to Lark takes time that grows with the square of the number of rules.
MAX_GBNF_BYTES = 2**16
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


def content_constraint(structured: StructuredOutputs | None) -> str | None:
    """Lark grammar of an answer's content; None leaves it free (serving-api 9.4).

    One line break may precede a JSON value. In it, a gap between parts is at most one space, or a
    line break and 32 spaces or tabs.

    Raises:
        BadRequest: what was asked cannot be a grammar; ``param`` names it (C43).
    """
    if structured is None:
        return None
    where = "structured_outputs"
    if structured.json is not None:
        return _json_grammar(json_rule(load_schema(structured.json, param=f"{where}.json")))
    if structured.json_object:
        return _json_grammar(json_rule({"type": "object"}))
    if structured.regex is not None:
        check_size(structured.regex, param=f"{where}.regex")
        return f"start: /{regex_to_lark(structured.regex)}/"
    if structured.choice is not None:
        return _choice_grammar(structured.choice, param=f"{where}.choice")
    if structured.grammar is not None:
        return lark_grammar(structured.grammar, param=f"{where}.grammar")
    assert structured.structural_tag is not None
    return structural_tag_grammar(structured.structural_tag, param=f"{where}.structural_tag")


def chat_constraint(
    prompt: ChatPrompt,
    tokenizer: Tokenizer,
    structured: StructuredOutputs | None,
    *,
    strict_level: str = "auto",
    tags: DsmlTags,
) -> Constraint | None:
    """What the engine enforces on a chat's answer: its form, its calls, and from where on.

    Reasoning is free (C42, R4): what is asked of the answer begins behind ``</think>``, or at once
    where the answer does. A block of calls is enforced from the model's first DSML marker on, in
    reasoning too; calls that are demanded come before anything else (C28, C29). Demanded calls
    take the place of a form of the content.

    Args:
        prompt: the encoded chat: its tools, and where its answer starts.
        tokenizer: knows the ids of the markers.
        structured: the form of the content.
        strict_level: ``--tool-strict-level``; ``auto`` and ``function`` enforce names,
            ``parameter`` arguments of every tool too.
        tags: names of the block's elements in the model's chat format.

    Raises:
        BadRequest: a form or a strict tool's schema that cannot be enforced.
    """
    content = content_constraint(structured)
    block = _tool_block(prompt, tokenizer, strict_level, tags)
    if prompt.start is AnswerStart.TOOL_BLOCK:
        assert block is not None, "the prompt opened a block of no tools"
        return Constraint(at_once=block.inside())
    after: tuple[tuple[int, str], ...] = ()
    answer = content
    if block is not None:
        after = ((tokenizer.marker_id(DSML), block.behind_marker()),)
        if prompt.tool_choice.mode in ("required", "named"):
            answer = block.whole()
        elif content is not None:
            answer = block.whole_or(content)
    if answer is not None and not prompt.start.is_reasoning:
        return Constraint(at_once=answer)
    if answer is not None:
        after = ((tokenizer.marker_id(THINK_END), answer), *after)
    return Constraint(after=after) if after else None


def bad_token_ids(bad_words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Ids of each bad word, as a text's beginning and behind a space, as in vLLM.

    Raises:
        BadRequest: an empty word.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for i, word in enumerate(bad_words):
        if not word:
            raise BadRequest(f"bad_words[{i}] is empty", param=f"bad_words[{i}]")
        plain = tuple(tokenizer.encode(word))
        sequences[plain] = None
        spaced = tuple(tokenizer.encode(" " + word.lstrip(" ")))
        if spaced[-len(plain) :] != plain:  # else the plain sequence stops it already
            sequences[spaced] = None
    return tuple(sequences)


def thinking_budget(
    sampling: SamplingParams, prompt: ChatPrompt, tokenizer: Tokenizer
) -> ThinkingBudget | None:
    """When reasoning is cut short; None without a budget, or where no reasoning is open."""
    if sampling.thinking_token_budget < 0 or not prompt.start.is_reasoning:
        return None
    return ThinkingBudget(sampling.thinking_token_budget, tokenizer.marker_id(THINK_END))


def lark_grammar(text: str, *, param: str) -> str:
    """A client's grammar in Lark's notation, whichever of the two it came in.

    Raises:
        BadRequest: GBNF that cannot be read, or a text that is too long.
    """
    check_size(text, param=param)
    if not _GBNF_RULE.search(text):
        return text
    check_size(text, param=param, limit=MAX_GBNF_BYTES)
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the library raises the bare class too
        raise invalid(f"{param} is not GBNF: {error}", param) from error


def _json_grammar(rule: str) -> str:
    return f'start: "\\n"? value\nvalue: {rule}'


def _choice_grammar(choices: Sequence[str], *, param: str) -> str:
    if not choices:
        raise invalid(f"{param} is empty; name at least one text", param)
    # One terminal, not as many rules: a lexer tells thousands apart, a parser does not.
    grammar = "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices))
    check_size(grammar, param=param)
    return grammar


def _tool_block(
    prompt: ChatPrompt, tokenizer: Tokenizer, strict_level: str, tags: DsmlTags
) -> ToolBlock | None:
    choice = prompt.tool_choice
    allowed = (choice.name,) if choice.mode == "named" else choice.allowed
    tools = {i: t for i, t in enumerate(prompt.tools) if allowed is None or t.name in allowed}
    if not tools or choice.mode == "none" or prompt.start is AnswerStart.PLAIN:
        return None
    return ToolBlock(
        tools,
        marker_id=tokenizer.marker_id(DSML),
        tags=tags,
        one_call=choice.mode == "named" or not choice.parallel,
        strict_arguments=strict_level == "parameter",
    )
