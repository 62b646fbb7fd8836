"""Token counts of one answer, before a dialect gives them its names (serving-api 13.3)."""

from __future__ import annotations

from typing import NamedTuple

from leadline.core.request import TokenOutput
from leadline.serving.admission import charge


class TokenCounts(NamedTuple):
    """What an answer cost.

    Attributes:
        prompt: tokens of all prompts, each counted once.
        cached: of these, the ones whose KV came from the prefix cache.
        replayed: of the cached ones, those fed again to rebuild windows.
        completion: generated tokens of all choices: reasoning, markup and end tokens too.
        reasoning: of these, the ones before the end of reasoning.
    """

    prompt: int
    cached: int
    replayed: int
    completion: int
    reasoning: int


class UsageMeter:
    """Counts tokens over the choices of one answer; every prompt counts once."""

    def __init__(self) -> None:
        self._num_prompt = self._num_cached = self._num_replayed = 0

    def admit(self, output: TokenOutput, num_prompt_tokens: int) -> None:
        """Note the first output of a prompt's first choice; its key pays for the prompt once."""
        charge(num_prompt_tokens)
        self._num_prompt += num_prompt_tokens
        self._num_cached += output.num_cached_tokens
        self._num_replayed += output.num_replayed_tokens

    def counts(self, num_completion: int, num_reasoning: int = 0) -> TokenCounts:
        """The counts so far; the arguments are those of all choices together."""
        return TokenCounts(
            self._num_prompt, self._num_cached, self._num_replayed, num_completion, num_reasoning
        )
