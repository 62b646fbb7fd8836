"""Drives grammars as the engine does: over a real tokenizer, token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

from leadline.engine.grammar_probe import read_tokenizer
from leadline.text.tokenizer import Tokenizer

DSML = "｜DSML｜"


class Grammars:
    """Grammars over one tokenizer, whose added tokens are all special: none of them is text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.added_ids = tokenizer.added_ids
        self._tokenizer = read_tokenizer(
            str(tokenizer.path), tokenizer.vocab_size, tokenizer.eos_token_id
        )
        self.dsml = tokenizer.marker_id(DSML)
        self.eos = tokenizer.eos_token_id

    def matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def error(self, grammar: str) -> str:
        return LLMatcher(self._tokenizer, grammar, log_level=0).get_error()

    def behind(self, grammar: str, text: str) -> LLMatcher:
        """The state after a text in which ``｜DSML｜`` stands for the marker."""
        matcher = self.matcher(grammar)
        ids = self.tokenizer.encode(text)
        assert matcher.try_consume_tokens(ids) == len(ids), (text, matcher.get_error())
        return matcher

    def accepts(self, grammar: str, text: str) -> bool:
        """Whether a text is complete; it may go on only with the end token where it must end."""
        matcher = self.matcher(grammar)
        ids = self.tokenizer.encode(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def allows(self, grammar: str, text: str) -> bool:
        """Whether a text is a beginning of what the grammar describes."""
        ids = self.tokenizer.encode(text)
        return self.matcher(grammar).try_consume_tokens(ids) == len(ids)

    def allowed(self, matcher: LLMatcher) -> list[int]:
        """Ids that the mask lets through."""
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        return [int(token_id) for token_id in np.flatnonzero(bits)]

    def walk(self, grammar: str, rng: random.Random, closing: Sequence[str]) -> str | None:
        """A random text under the mask; None when it does not end within 400 tokens.

        Most tokens are of ``closing`` where the mask allows it, so that walks end.
        """
        closers = {self.tokenizer.encode(text)[0] for text in closing} | {self.eos, self.dsml}
        matcher = self.matcher(grammar)
        ids: list[int] = []
        while len(ids) < 400:
            allowed = self.allowed(matcher)
            assert allowed, self.tokenizer.decode(ids)
            preferred = [token_id for token_id in allowed if token_id in closers]
            token_id = rng.choice(preferred if preferred and rng.random() < 0.8 else allowed)
            if token_id == self.eos:
                return self.tokenizer.decode(ids)
            assert matcher.consume_token(token_id), matcher.get_error()
            ids.append(token_id)
        return None
