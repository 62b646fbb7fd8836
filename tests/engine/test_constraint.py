from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from leadline.core.request import Constraint
from leadline.engine.constraint import ConstraintState, TokenMasks
from leadline.engine.grammar import GrammarCompiler
from tests.fakes import EOS, FIRST_ID, VOCAB_SIZE
from tests.grammars import THINK_END, TOOL, ids_of, text_of, write_tokenizer

MASKS = TokenMasks()
OBJECT = (
    'start: %json {"type": "object", "properties": {"a": {"type": "array", "items": '
    '{"enum": ["x", "yy"]}}, "b": {"type": "integer"}}, "required": ["a", "b"], '
    '"additionalProperties": false, "x-guidance": {"whitespace_flexible": false}}'
)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return GrammarCompiler(write_tokenizer(folder))


def start(compiler: GrammarCompiler, constraint: Constraint) -> ConstraintState:
    return compiler.compile(constraint).result().copy()


def allowed(state: ConstraintState) -> list[int]:
    """Ids that may come next; every id while tokens are free."""
    if state.matcher is None:
        return list(range(VOCAB_SIZE))
    [mask] = MASKS.fill([state.matcher], VOCAB_SIZE)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    return np.flatnonzero(bits).tolist()


def test_a_grammar_at_once_masks_from_the_first_token(compiler: GrammarCompiler) -> None:
    state = start(compiler, Constraint('start: "ab" | "ac" "d"?'))
    assert allowed(state) == ids_of("a")
    state.accept(ids_of("a"))
    assert allowed(state) == ids_of("bc")
    assert not state.is_complete
    state.accept(ids_of("c"))
    assert allowed(state) == [EOS, *ids_of("d")]
    assert not state.is_complete
    state.accept(ids_of("d"))
    assert state.is_complete
    assert state.error is None


def test_the_end_token_completes_a_grammar_that_could_go_on(compiler: GrammarCompiler) -> None:
    state = start(compiler, Constraint('start: "a"+'))
    state.accept([*ids_of("aa"), EOS])
    assert state.is_complete


def test_the_trigger_that_comes_decides_and_later_ones_are_tokens(
    compiler: GrammarCompiler,
) -> None:
    constraint = Constraint(after=((THINK_END, 'start: "a" <[4]> "b"'), (TOOL, 'start: "c"')))
    state = start(compiler, constraint)
    state.accept(ids_of("zzz"))
    assert state.matcher is None
    other = state.copy()
    state.accept([THINK_END])
    assert allowed(state) == ids_of("a")
    state.accept([*ids_of("a"), TOOL])
    assert allowed(state) == ids_of("b")
    other.accept([TOOL])
    assert allowed(other) == ids_of("c")


def test_a_forbidden_token_is_an_error_from_then_on(compiler: GrammarCompiler) -> None:
    state = start(compiler, Constraint('start: "abc"'))
    state.accept(ids_of("az"))
    assert state.error is not None
    assert "doesn't satisfy the grammar" in state.error
    assert not state.is_complete
    state.accept(ids_of("b"))
    assert state.error is not None


def test_c42_any_grouping_of_accepted_tokens_leads_to_the_same_state(
    compiler: GrammarCompiler,
) -> None:
    """Steps bring one to five tokens, some of drafts whose end is rejected, trigger included."""
    rng = random.Random(7)
    constraint = Constraint(after=((THINK_END, OBJECT),))
    for _ in range(1000):
        answer = [*rng.choices(range(FIRST_ID, VOCAB_SIZE), k=rng.randrange(6)), THINK_END]
        state, reference = start(compiler, constraint), start(compiler, constraint)
        tokens: list[int] = []
        while not state.is_complete and len(tokens) < 60:
            draft_state = state.copy()
            draft = []
            for place in range(len(tokens), len(tokens) + rng.randint(1, 5)):
                is_free = place < len(answer)
                token = answer[place] if is_free else rng.choice(allowed(draft_state))
                draft.append(token)
                draft_state.accept([token])
                if draft_state.is_complete:
                    break
            accepted = draft[: rng.randint(1, len(draft))]
            state.accept(accepted)
            for token in accepted:
                reference.accept([token])
            tokens += accepted
            assert state.error is None
            assert state.is_complete == reference.is_complete
        assert allowed(state) == allowed(reference)
        content = text_of(tokens).partition("</think>")[2]
        assert content.startswith('{"a":[')
        assert not state.is_complete or content.removesuffix("<eos>").endswith("}")


def test_many_grammars_are_filled_row_by_row(compiler: GrammarCompiler) -> None:
    states = [start(compiler, Constraint(f'start: "{letter}"')) for letter in "abcdefgh"]
    matchers = [state.matcher for state in states if state.matcher]
    masks = MASKS.fill(matchers, VOCAB_SIZE)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB_SIZE]
    assert [np.flatnonzero(row).tolist() for row in bits] == [[i] for i in ids_of("abcdefgh")]


def test_an_object_may_have_a_thousand_optional_properties(compiler: GrammarCompiler) -> None:
    properties = {f"p{i}": {"enum": ["a", "b"]} for i in range(1000)}
    grammar = f"start: %json {json.dumps({'properties': properties, 'type': 'object'})}"
    state = start(compiler, Constraint(grammar))
    for token in ids_of('{"p999":"b"}'):
        assert token in allowed(state)
        state.accept([token])
    assert state.is_complete
