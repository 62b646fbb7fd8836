"""Deltas of a chat: any tokens at all, cut anywhere, give the same answer, and never markup."""

from __future__ import annotations

import json
import logging
import random
from itertools import pairwise, repeat
from typing import Any

import deepseek_recipe as recipe
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.core.request import FinishReason, SamplingParams, TokenOutput
from leadline.text.chat import (
    AnswerStart,
    CallStart,
    ChatPrompt,
    Content,
    SampledTurn,
    Tool,
    ToolChoice,
)
from leadline.text.output_parser import Fault, OutputParser, ParserOptions
from leadline.text.tokenizer import Tokenizer
from leadline.text.tool_calls import ToolCallReader
from tests.text.answers import (
    DSML,
    MARKERS,
    TOOLS,
    Answer,
    Script,
    block,
    fragments,
    invoke,
    make_corpus,
    parameter,
    parse_arguments,
    read,
)

CORPUS = make_corpus()
LENGTH = FinishReason.LENGTH
REASONING = AnswerStart.REASONING


def assert_no_markup(answer: Answer) -> None:
    texts = [answer.reasoning, answer.content, *(arguments for _, arguments in answer.calls)]
    assert not [marker for marker in MARKERS if any(marker in text for text in texts)]


def one_by_one(tokenizer: Tokenizer, script: str, **how: Any) -> Answer:
    return read(tokenizer, script, sizes=repeat(1), **how)


# The corpus: intended results, for every way to cut it


def test_c18_streaming_equals_the_whole_for_a_corpus_and_any_cut(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for script in CORPUS:
        whole = read(tokenizer, script.text, start=script.start)
        random_sizes = [rng.randint(1, 9) for _ in range(len(script.text))]
        for sizes in (repeat(1), repeat(2), repeat(3), random_sizes):
            pieces = read(tokenizer, script.text, start=script.start, sizes=sizes)
            assert pieces.said == whole.said, script.text


def test_c19_c20_c22_corpus_gives_the_intended_answer(tokenizer: Tokenizer) -> None:
    for script in CORPUS:
        answer = one_by_one(tokenizer, script.text, start=script.start)
        got = [(name, parse_arguments(arguments)) for name, arguments in answer.calls]
        assert got == script.calls, script.text
        assert (answer.reasoning, answer.content) == (script.reasoning, script.content)
        assert answer.parser.finish_reason == ("tool_calls" if script.calls else "stop")
        assert not answer.parser.faults
        assert_no_markup(answer)
        if script.calls:
            contents = [delta.text for delta in answer.deltas if isinstance(delta, Content)]
            assert all(text.strip() for text in contents), script.text


def test_c25_answers_cut_at_any_token_are_beginnings_of_the_whole(tokenizer: Tokenizer) -> None:
    for script in CORPUS[:10]:
        ids = tokenizer.encode(script.text)
        whole = read(tokenizer, ids, start=script.start)
        for end in range(len(ids)):
            answer = read(tokenizer, ids[:end], start=script.start, reason=LENGTH, sizes=repeat(1))
            assert answer.parser.finish_reason == "length"
            assert_no_markup(answer)
            # Newlines may turn out to be blank lines; an unfinished character is one U+FFFD.
            assert whole.content.startswith(answer.content.rstrip("\n\ufffd"))
            assert whole.reasoning.startswith(answer.reasoning.rstrip("\n\ufffd"))
            for (name, arguments), (whole_name, whole_arguments) in zip(
                answer.calls, whole.calls, strict=False
            ):
                assert name == whole_name
                assert whole_arguments.startswith(arguments.rstrip("\ufffd")), script.text


def test_scrambled_answers_never_fail_and_never_leak(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    for script in CORPUS:
        ids = tokenizer.encode(script.text)
        for _ in range(rng.randint(1, 6)):
            at, other = rng.randrange(len(ids) + 1), rng.randrange(len(ids) + 1)
            change = rng.choice(["delete", "repeat", "insert"])
            if change == "delete":
                del ids[at : at + rng.randint(1, 8)]
            elif change == "repeat":
                ids[at:at] = ids[other : other + 12]
            else:
                ids.insert(at, tokenizer.marker_id(rng.choice(MARKERS)))
        check_any_tokens(tokenizer, ids, script.start, rng.choice([1, 2, 5]))


def check_any_tokens(tokenizer: Tokenizer, ids: list[int], start: AnswerStart, size: int) -> None:
    for reason in (FinishReason.STOP, LENGTH):
        whole = read(tokenizer, ids, start=start, reason=reason)
        pieces = read(tokenizer, ids, start=start, reason=reason, sizes=repeat(size))
        assert pieces.said == whole.said
        assert whole.parser.faults[Fault.INTERNAL_ERROR] == 0
        assert whole.parser.num_tokens == len(ids) + (reason is FinishReason.STOP)
        assert_no_markup(whole)
        if reason is FinishReason.STOP:
            assert all(isinstance(arguments, dict) for arguments in whole.arguments)


TAG_WORDS = [
    "<", "</", ">", "\n", " ", "'", '"', "/>", "=", "a", "{", "}", ", ", "1", "NaN",
    " calls", " invoke", " parameter", ' name="run"', ' name="command"', ' string="true"',
    ' name="count"', ' string="false"', ' name="arguments"', '{"count": "3"}', "\\", "é",
]  # fmt: skip


@given(
    parts=st.lists(st.sampled_from([*TAG_WORDS, *MARKERS, f"<{DSML}", f"</{DSML}"]), max_size=40),
    start=st.sampled_from(AnswerStart),
    size=st.integers(1, 5),
)
def test_soup_of_tag_parts_parses_the_same_for_any_cut(
    tokenizer: Tokenizer, parts: list[str], start: AnswerStart, size: int
) -> None:
    if start is not AnswerStart.PLAIN:
        check_any_tokens(tokenizer, tokenizer.encode("".join(parts)), start, size)


@given(
    ids=st.lists(st.integers(2, 1100), max_size=60),  # past the vocabulary too: a model has more
    size=st.integers(1, 7),
    start=st.sampled_from([REASONING, AnswerStart.CONTENT, AnswerStart.TOOL_BLOCK]),
)
def test_any_ids_parse_the_same_for_any_cut(
    tokenizer: Tokenizer, ids: list[int], size: int, start: AnswerStart
) -> None:
    check_any_tokens(tokenizer, ids, start, size)


@given(ids=st.lists(st.integers(3, 900), max_size=40))
def test_c2_ordinary_tokens_lose_no_byte(tokenizer: Tokenizer, ids: list[int]) -> None:
    answer = read(tokenizer, ids, sizes=repeat(1))
    # Leading newlines of an answer are not part of it (3.2).
    assert answer.content == tokenizer.decode(ids).lstrip("\n")


def test_c2_characters_split_over_tokens_stream_whole(tokenizer: Tokenizer) -> None:
    text = "😀漢"
    assert len(tokenizer.encode(text)) > 4
    whole = f"</think>{text}{block(invoke(parameter('command', text * 40)))}"
    answer = one_by_one(tokenizer, text + whole, start=REASONING)
    assert (answer.reasoning, answer.content) == (text, text)
    assert answer.arguments == [{"command": text * 40}]
    cut_off = read(tokenizer, tokenizer.encode(text)[:-1], reason=LENGTH)
    assert cut_off.content == "😀\ufffd"


# The model maker's own parser, on well-formed answers


class Oracle:
    """``deepseek-recipe``'s stream parser."""

    special = recipe.SpecialTokens(image="<｜deepseek_image｜>")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = recipe.Tokenizer.from_file(str(tokenizer.path))
        options = recipe.ConversionOptions(default_thinking_mode=True)
        self._options = options.with_special_tokens(self.special)

    def read(self, ids: list[int], script: Script) -> tuple[str, str, list[tuple[str, Any]]]:
        body = {
            "model": "DeepSeek-V4.1-Flash",
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": {"name": "free"}}],
            "thinking": {"type": "enabled" if script.start is REASONING else "disabled"},
        }
        request = recipe.ChatCompletionRequest(msgspec.json.encode(body)).convert(self._options)
        options = request.parsing_options
        options.special_tokens = self.special
        generator = recipe.ChatCompletionRequest.chunk_generator(request, "", "")
        stream = recipe.StreamProcessor(generator, options, self._tokenizer)
        stream.push(recipe.InferenceChunk.ready())
        events = [*stream.push(recipe.InferenceChunk.tokens(tuple(ids)))]
        events += stream.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
        content = reasoning = ""
        calls: list[list[str]] = []
        for item in events:
            delta = json.loads(item.to_json())["choices"][0]["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                if call.get("id"):
                    calls.append([call["function"]["name"], ""])
                calls[-1][1] += call["function"].get("arguments") or ""
        return reasoning, content, [(name, json.loads(text)) for name, text in calls]


def test_well_formed_answers_read_as_the_model_makers_parser_reads_them(
    tokenizer: Tokenizer,
) -> None:
    oracle = Oracle(tokenizer)
    well_formed = CORPUS[::2]
    assert len(well_formed) >= 100
    for script in well_formed:
        ids = tokenizer.encode(script.text)
        answer = read(tokenizer, ids, start=script.start)
        got = [(name, json.loads(arguments)) for name, arguments in answer.calls]
        assert (answer.reasoning, answer.content, got) == oracle.read(ids, script), script.text


# States (3.2)


@pytest.mark.parametrize(
    ("start", "text", "reasoning", "content"),
    [
        (REASONING, "\n\nhm\n\n</think>\n\nso", "hm", "so"),
        (REASONING, "a\n\nb", "a\n\nb", ""),
        (REASONING, "open\n", "open\n", ""),
        (REASONING, "a<think>b</think>c", "ab", "c"),
        (REASONING, "</think>and</think>so", "", "andso"),
        (REASONING, "x <</think>y", "x <", "y"),
        (AnswerStart.REASONING_CONTINUED, "\nhm</think>so", "\nhm", "so"),
        (AnswerStart.CONTENT, "\n\nso", "", "so"),
        (AnswerStart.CONTENT, "so\n\n", "", "so\n\n"),
        (AnswerStart.CONTENT, "a<think>\nhm\n</think>\nb", "hm", "ab"),
        (AnswerStart.CONTENT_CONTINUED, "\n\nso", "", "\n\nso"),
        (AnswerStart.CONTENT, "a<｜User｜>b", "", "ab"),
        (AnswerStart.PLAIN, "a</think>b", "", "a</think>b"),
        (AnswerStart.PLAIN, f"a <{DSML} calls>", "", f"a <{DSML} calls>"),
    ],
)
def test_text_belongs_to_reasoning_or_content(
    tokenizer: Tokenizer, start: AnswerStart, text: str, reasoning: str, content: str
) -> None:
    answer = one_by_one(tokenizer, text, start=start)
    assert (answer.reasoning, answer.content) == (reasoning, content)
    assert (answer.calls, answer.parser.finish_reason) == ([], "stop")


@pytest.mark.parametrize("reason", [LENGTH, FinishReason.STOP], ids=str)
def test_item_69_reasoning_that_never_closes_is_all_reasoning(
    tokenizer: Tokenizer, reason: FinishReason
) -> None:
    answer = one_by_one(tokenizer, "hm\n\nhm", start=REASONING, reason=reason)
    assert (answer.reasoning, answer.content) == ("hm\n\nhm", "")
    assert answer.parser.finish_reason == reason


def test_item_70_call_inside_unfinished_reasoning_is_a_call(tokenizer: Tokenizer) -> None:
    answer = one_by_one(tokenizer, "hm" + block(invoke(name="free")), start=REASONING)
    assert (answer.reasoning, answer.content) == ("hm", "")
    assert answer.calls == [("free", "{}")]
    assert answer.parser.finish_reason == "tool_calls"


@pytest.mark.parametrize("start", [REASONING, AnswerStart.CONTENT], ids=str)
@pytest.mark.parametrize("marker", ["</think>", f"<{DSML} calls>"])
def test_item_71_markers_spelled_by_ordinary_tokens_are_text(
    tokenizer: Tokenizer, start: AnswerStart, marker: str
) -> None:
    ids = [id for character in f"a{marker}b" for id in tokenizer.encode(character)]
    answer = read(tokenizer, ids, start=start, sizes=repeat(1))
    assert answer.reasoning + answer.content == f"a{marker}b"


def test_marker_without_a_bracket_before_it_is_no_tag(tokenizer: Tokenizer) -> None:
    answer = one_by_one(tokenizer, f"the {DSML} tool > that{DSML}")
    assert (answer.content, answer.parser.finish_reason) == ("the  tool > that", "stop")
    doubled = f'<{DSML}{DSML} invoke name="run">'
    assert one_by_one(tokenizer, doubled).calls == [("run", "{}")]


def test_reasoning_tokens_are_those_before_the_marker(tokenizer: Tokenizer) -> None:
    reasoning = tokenizer.encode("\n\nhm 😀")
    text = "\n\nhm 😀</think>and</think>so"
    assert read(tokenizer, text, start=REASONING).parser.num_reasoning_tokens == len(reasoning)
    assert read(tokenizer, text).parser.num_reasoning_tokens == 0


def test_block_that_the_prompt_opened_needs_no_tag(tokenizer: Tokenizer) -> None:
    text = invoke(parameter("command", "ls")) + f"</{DSML} calls>"
    answer = one_by_one(tokenizer, text, start=AnswerStart.TOOL_BLOCK)
    assert answer.content == ""
    assert answer.calls == [("run", '{"command": "ls"}')]


# Arguments (3.4): the table is tests/text/test_tool_arguments.py; here, what streaming adds


R1_VALUES = ["ls 2>&1", "x <", "x </", "</parameter", "a>", "a <b> c", "<<<", "</</", "a</b>\n"]


@pytest.mark.parametrize("value", R1_VALUES)
@pytest.mark.parametrize("padding", [0, 200], ids=["short", "long"])
def test_c24_r1_values_with_brackets_survive_every_cut(
    tokenizer: Tokenizer, value: str, padding: int
) -> None:
    value = "." * padding + value
    text = "hm</think>" + block(invoke(parameter("command", value)))
    ids = tokenizer.encode(text)
    for border in range(len(ids)):
        answer = read(tokenizer, ids, start=REASONING, sizes=[border, 1])
        assert answer.arguments == [{"command": value}]
    pieces = fragments(read(tokenizer, ids, start=REASONING, sizes=repeat(1)))
    assert not any(DSML in piece for piece in pieces)


def test_c23_r15_long_strings_flow_with_their_tokens(tokenizer: Tokenizer) -> None:
    line = 'print("a < b")\n\t# é\n'
    value = line * (20_000 // len(tokenizer.encode(line)) + 1)
    ids = tokenizer.encode(block(invoke(parameter("command", value))))
    prompt = ChatPrompt((0,), AnswerStart.CONTENT, False, tools=TOOLS)
    parser = OutputParser(tokenizer, prompt, SamplingParams())
    steps = [parser.push(TokenOutput("r", (token_id,))) for token_id in ids]
    said = [i for i, deltas in enumerate(steps) if deltas]
    began, first, *_ = said
    assert isinstance(steps[began][0], CallStart)
    assert first - began < 0.01 * len(ids)
    assert len(said) > 1000
    inside = [i for i in said if i >= first]
    # A character of two bytes and the hold-back for a tag: nothing waits longer.
    assert max(after - before for before, after in pairwise(inside)) <= 12
    assert read(tokenizer, ids).arguments == [{"command": value}]


def test_r6_declared_types_win_while_streaming(tokenizer: Tokenizer) -> None:
    text = block(
        invoke(
            parameter("flag", "true"),
            parameter("count", "3"),
            parameter("items", "[1]"),
            parameter("options", "{}"),
            parameter("limit", "null"),
            parameter("command", "42", string="false"),
            parameter("undeclared", "true"),
        )
    )
    typed = {"flag": True, "count": 3, "items": [1], "options": {}, "limit": None}
    rest = {"command": "42", "undeclared": "true"}
    assert one_by_one(tokenizer, text).arguments == [typed | rest]
    [plain] = one_by_one(tokenizer, text, options=ParserOptions(coerces=False)).arguments
    assert plain == {
        **{"flag": "true", "count": "3", "items": "[1]", "options": "{}", "limit": "null"},
        **{"command": 42, "undeclared": "true"},
    }


# Calls (3.5)


def test_call_begins_as_soon_as_its_name_is_known(tokenizer: Tokenizer) -> None:
    answer = one_by_one(tokenizer, f'<{DSML} calls>\n<{DSML} invoke name="run">', reason=LENGTH)
    [start] = answer.deltas
    assert isinstance(start, CallStart)
    assert (start.index, start.name) == (0, "run")


def test_content_comes_before_calls_and_calls_one_after_the_other(tokenizer: Tokenizer) -> None:
    text = "Both." + block(invoke(parameter("command", "x" * 300)), invoke(name="free"))
    answer = one_by_one(tokenizer, text)
    order = [getattr(delta, "index", -1) for delta in answer.deltas]
    assert order == sorted(order)
    starts = [delta for delta in answer.deltas if isinstance(delta, CallStart)]
    assert [start.index for start in starts] == [0, 1]


@pytest.mark.parametrize(
    "choice", [ToolChoice(parallel=False), ToolChoice("named", "run")], ids=["single", "named"]
)
def test_item_78_one_call_at_most(tokenizer: Tokenizer, choice: ToolChoice) -> None:
    text = block(invoke(parameter("command", "a")), invoke(parameter("command", "b")))
    answer = one_by_one(tokenizer, text, choice=choice)
    assert answer.calls == [("run", '{"command": "a"}')]
    assert answer.parser.finish_reason == "tool_calls"
    assert answer.parser.sampled_turn() is None  # the ids say more than the client heard


# Truncation and failure (3.6)


def test_c25_cut_inside_a_value_leaves_it_open(tokenizer: Tokenizer) -> None:
    head = f'<{DSML} calls>\n<{DSML} invoke name="run">\n'
    text = head + f'<{DSML} parameter name="command" string="true">echo "a'
    answer = one_by_one(tokenizer, text, reason=LENGTH)
    assert answer.calls == [("run", '{"command": "echo \\"a')]
    assert answer.parser.finish_reason == "length"
    assert answer.parser.sampled_turn() is None


@pytest.mark.parametrize("reason", [LENGTH, FinishReason.STOP], ids=str)
@pytest.mark.parametrize("tail", [f"<{DSML}", f"<{DSML} invoke", f'<{DSML} invoke name="ru'])
def test_c25_cut_before_the_name_is_complete_is_no_call(
    tokenizer: Tokenizer, reason: FinishReason, tail: str
) -> None:
    answer = one_by_one(tokenizer, f"a\n\n<{DSML} calls>\n{tail}", reason=reason)
    assert (answer.content, answer.calls) == ("a", [])
    assert answer.parser.finish_reason == reason


@pytest.mark.parametrize("tail", ["", "</"], ids=["in the value", "in what may be a tag"])
def test_c22_end_token_inside_a_call_closes_it(tokenizer: Tokenizer, tail: str) -> None:
    text = f'<{DSML} invoke name="run"><{DSML} parameter name="command" string="true">echo{tail}'
    answer = one_by_one(tokenizer, text)
    assert answer.arguments == [{"command": f"echo{tail}"}]
    assert answer.parser.finish_reason == "tool_calls"


def test_stop_token_inside_a_call_closes_it(tokenizer: Tokenizer) -> None:
    text = f'<{DSML} invoke name="run"><{DSML} parameter name="command" string="true">a'
    prompt = ChatPrompt((0,), AnswerStart.CONTENT, False, tools=TOOLS)
    parser = OutputParser(tokenizer, prompt, SamplingParams(stop_token_ids=(77,)))
    ids = (*tokenizer.encode(text), 77)
    output = TokenOutput("r", ids, finish_reason=FinishReason.STOP, stop_token_id=77)
    answer = Answer(parser, parser.push(output))
    assert answer.arguments == [{"command": "a"}]
    assert (parser.finish_reason, parser.stop_reason) == ("tool_calls", 77)
    assert parser.num_tokens == len(ids)


def test_block_without_a_call_is_dropped_logged_and_counted(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "leadline"):
        answer = one_by_one(tokenizer, f"a\n\n<{DSML} calls>\nwhat?</{DSML} calls>")
    assert (answer.content, answer.calls) == ("a", [])
    assert answer.parser.finish_reason == "stop"
    assert answer.parser.faults == {Fault.BLOCK_WITHOUT_CALL: 1}
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]
    assert "what?" in caplog.text


def test_unknown_tool_is_returned_as_it_is(tokenizer: Tokenizer) -> None:
    text = block(invoke(parameter("a", "1", string="false"), name="no_such"))
    assert one_by_one(tokenizer, text).calls == [("no_such", '{"a": 1}')]


def test_defect_of_the_parser_is_counted_and_the_stream_goes_on(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("secret text")

    monkeypatch.setattr(ToolCallReader, "_parameter", fail)
    text = "before" + block(invoke(parameter("command", "a")))
    answer = one_by_one(tokenizer, text)
    assert answer.content == "before"
    assert answer.calls == [("run", "{}")]
    assert answer.parser.finish_reason == "tool_calls"
    assert answer.parser.faults == {Fault.INTERNAL_ERROR: 2}
    assert "secret" not in caplog.text  # no output text at info level and above (item 95)


# Without tools (3.7)


@pytest.mark.parametrize("start", [REASONING, AnswerStart.CONTENT], ids=str)
def test_item_77_without_tools_a_block_is_withheld(
    tokenizer: Tokenizer, start: AnswerStart
) -> None:
    text = "a" + block(invoke(parameter("command", "x"))) + "</think>b"
    answer = one_by_one(tokenizer, text, start=start, tools=())
    assert (answer.reasoning + answer.content).rstrip("\n") == "a"
    assert answer.calls == []
    assert answer.parser.finish_reason == "stop"
    assert answer.parser.faults == {Fault.BLOCK_WITHOUT_TOOLS: 1}


def test_raw_markup_passes_a_block_through_where_there_are_no_tools(tokenizer: Tokenizer) -> None:
    text = "a" + block(invoke(parameter("command", "x")))
    options = ParserOptions(raw_markup=True)
    assert one_by_one(tokenizer, text, tools=(), options=options).content == text
    assert one_by_one(tokenizer, text, options=options).content == "a"


# Stop strings, min_tokens, ignore_eos (9.1)


def test_item_72_stop_string_cuts_content_only(tokenizer: Tokenizer) -> None:
    text = "a\n\nb</think>c" + block(invoke(parameter("command", "d\n\ne")))
    answer = one_by_one(tokenizer, text, start=REASONING, stop="\n\n")
    assert (answer.reasoning, answer.content) == ("a\n\nb", "c")
    assert answer.arguments == [{"command": "d\n\ne"}]
    assert answer.parser.finish_reason == "tool_calls"


@pytest.mark.parametrize("tools", [TOOLS, ()], ids=["tools", "no tools"])
def test_item_72_stop_string_is_found_across_tokens_and_never_shown(
    tokenizer: Tokenizer, tools: tuple[Tool, ...]
) -> None:
    answer = one_by_one(tokenizer, "one\n\ntwo", stop="\n\n", tools=tools)
    assert answer.content == "one"
    assert (answer.parser.finish_reason, answer.parser.stop_reason) == ("stop", "\n\n")


def test_begun_stop_string_is_released_before_a_call(tokenizer: Tokenizer) -> None:
    answer = one_by_one(tokenizer, "a S" + block(invoke(name="free")), stop="STOP")
    assert (answer.content, answer.calls) == ("a S", [("free", "{}")])
    assert isinstance(answer.deltas[-2], CallStart)


def test_item_73_stop_string_waits_for_min_tokens(tokenizer: Tokenizer) -> None:
    text = "S" * 30
    answer = one_by_one(tokenizer, text, stop="S", min_tokens=20, max_tokens=100)
    assert answer.parser.num_tokens > 20
    assert answer.content == "S" * (answer.parser.num_tokens - 1)


def test_item_74_end_token_is_never_text(tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_token_id
    ids = [*tokenizer.encode("a"), eos, *tokenizer.encode("b"), eos]
    answer = read(tokenizer, ids, reason=LENGTH, ignore_eos=True, skip_special_tokens=False)
    assert (answer.content, answer.parser.num_tokens) == ("ab", len(ids))


# What is remembered of a turn (C12)


def test_c12_turn_with_calls_is_remembered_as_sampled(tokenizer: Tokenizer) -> None:
    called = "\n\nok" + block(invoke(parameter("count", " 3 ", string="false")))
    answer = one_by_one(tokenizer, "hm</think>" + called, start=REASONING)
    [start] = [delta for delta in answer.deltas if isinstance(delta, CallStart)]
    want = SampledTurn(tuple(tokenizer.encode(called)), "ok", ((start.id, "run", '{"count": 3}'),))
    assert answer.parser.sampled_turn() == want


@pytest.mark.parametrize(
    ("start", "text"),
    [
        (AnswerStart.CONTENT, "no call"),
        (REASONING, "hm" + block(invoke())),
        (AnswerStart.CONTENT, "a<think>hm</think>" + block(invoke())),
        (AnswerStart.CONTENT_CONTINUED, "b" + block(invoke())),
    ],
    ids=["no call", "call in reasoning", "reasoning in content", "continued content"],
)
def test_c12_turns_that_ids_would_not_render_are_not_remembered(
    tokenizer: Tokenizer, start: AnswerStart, text: str
) -> None:
    assert one_by_one(tokenizer, text, start=start).parser.sampled_turn() is None
