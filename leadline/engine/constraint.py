"""What a request's grammars allow after its tokens so far, and masks for a batch. No torch.

``llguidance`` is imported when the first grammar comes: engines without grammars do without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLExecutor, LLMatcher
    from numpy.typing import NDArray


class ConstraintState:
    """A request's ``Constraint`` after the tokens that it has accepted (serving-api 9.4, C42).

    It depends on those tokens alone, not on how many came at a time: a step may bring several,
    with the trigger among them.

    Args:
        at_once: the grammar that holds from the first token on, if one does.
        after: trigger id -> the grammar that holds behind it.
    """

    def __init__(self, at_once: LLMatcher | None, after: Mapping[int, LLMatcher]) -> None:
        self._matcher = at_once
        self._after = after

    def copy(self) -> ConstraintState:
        """The same state for another request; grammars are shared, positions are not."""
        return ConstraintState(
            self._matcher and self._matcher.deep_copy(),
            {trigger: matcher.deep_copy() for trigger, matcher in self._after.items()},
        )

    @property
    def matcher(self) -> LLMatcher | None:
        """The grammar that holds for the next token; None while tokens are free."""
        return self._matcher

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow but the end."""
        return self._matcher is not None and self._matcher.is_stopped() and not self.error

    @property
    def error(self) -> str | None:
        """Why the grammar's engine gave up, if it did; it never recovers."""
        if self._matcher is None or not self._matcher.is_error():
            return None
        return first_words(self._matcher.get_error())

    def accept(self, token_ids: Sequence[int]) -> None:
        """Advance by generated tokens; one that is not allowed is an error from then on."""
        for token_id in token_ids:
            if self._matcher is None:
                self._matcher = self._after.get(token_id)
            else:
                self._matcher.consume_token(token_id)


class TokenMasks:
    """Fills the masks of many grammars side by side, without the interpreter's lock."""

    @cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor()

    def fill(self, matchers: Sequence[LLMatcher], vocab_size: int) -> NDArray[np.int32]:
        """Bits of the ids that each grammar allows next: ``[n, ceil(vocab_size / 32)]``.

        A grammar whose engine gives up is in error afterwards, and its row says nothing.
        """
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

        masks = allocate_token_bitmask(len(matchers), vocab_size)
        rows = [(matcher, row) for row, matcher in enumerate(matchers)]
        fill_next_token_bitmask_par(self._executor, rows, masks)
        return masks


def first_words(message: str) -> str:
    """What a grammar error says, without the traces behind it."""
    words = " ".join(re.split("<(?:backtrace|state)>", message)[0].split())
    return words if len(words) <= 500 else f"{words[:500]} ..."
