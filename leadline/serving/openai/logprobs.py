"""Log-probabilities in the layouts of the OpenAI API and of vLLM (serving-api 9.3)."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

from msgspec import Struct

from leadline.core.request import TokenLogprobs
from leadline.text.tokenizer import Tokenizer

_JSON_MINUS_INFINITY = -9999.0


class TopLogprob(Struct):
    """One token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A sampled token, with the most likely ones beside it."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Entries of every generated token: reasoning, content and tool markup alike."""

    content: list[TokenLogprob]


class CompletionLogprobs(Struct):
    """The old layout: four lists of equal length; a prompt's first token has no values."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []

    def extend(self, other: CompletionLogprobs) -> None:
        """Append the entries of the text that follows."""
        self.tokens += other.tokens
        self.token_logprobs += other.token_logprobs
        self.top_logprobs += other.top_logprobs
        self.text_offset += other.text_offset


class PromptLogprob(Struct):
    """One candidate for a prompt position, in vLLM's layout."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class LogprobWriter:
    """Writes entries with one way of showing tokens.

    Args:
        tokenizer: gives texts and bytes.
        as_ids: tokens are shown as ``token_id:N``, which names ids that share a text.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def chat(self, entries: Sequence[TokenLogprobs]) -> list[TokenLogprob]:
        """Entries of ``choices[].logprobs.content``."""
        return [self._chat_entry(entry) for entry in entries]

    def _chat_entry(self, entry: TokenLogprobs) -> TokenLogprob:
        token = self._top(entry.token_id, entry.logprob)
        return TokenLogprob(
            token=token.token,
            logprob=token.logprob,
            bytes=token.bytes,
            top_logprobs=[self._top(token_id, value) for token_id, value in entry.top],
        )

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        raw = self._tokenizer.token_bytes((token_id,))
        return TopLogprob(self._text(token_id), _finite(logprob), list(raw))

    def completion(
        self,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprobs | None],
        *,
        offset: int,
        hidden: Container[int] = (),
    ) -> CompletionLogprobs:
        """The old layout.

        Args:
            token_ids: one for each entry.
            entries: None for a token that follows nothing.
            offset: where the first token begins in the choice's text.
            hidden: ids that the text does not show.
        """
        written = CompletionLogprobs()
        for token_id, entry in zip(token_ids, entries, strict=True):
            written.tokens.append(self._text(token_id))
            written.text_offset.append(offset)
            if token_id not in hidden:
                offset += len(self._tokenizer.decode((token_id,)))
            written.token_logprobs.append(None if entry is None else _finite(entry.logprob))
            written.top_logprobs.append(None if entry is None else self._top_texts(entry))
        return written

    def _top_texts(self, entry: TokenLogprobs) -> dict[str, float]:
        # The sampled token is always present, inside the top list or not.
        found = {entry.token_id: entry.logprob, **dict(entry.top)}
        return {self._text(token_id): _finite(value) for token_id, value in found.items()}

    def prompt(self, entries: Sequence[TokenLogprobs | None]) -> PromptLogprobs:
        """vLLM's ``prompt_logprobs``: candidates by id for every position, the first null."""
        return [None if entry is None else self._candidates(entry) for entry in entries]

    def _candidates(self, entry: TokenLogprobs) -> dict[str, PromptLogprob]:
        ranks = {token_id: (value, i + 1) for i, (token_id, value) in enumerate(entry.top)}
        ranks[entry.token_id] = (entry.logprob, entry.rank)
        return {
            str(token_id): PromptLogprob(_finite(value), rank, self._tokenizer.decode((token_id,)))
            for token_id, (value, rank) in ranks.items()
        }

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.decode((token_id,))


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _JSON_MINUS_INFINITY
