"""Ids -> text as they arrive: never half a character, never a piece of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from leadline.core.request import FinishReason, SamplingParams, TokenOutput
from leadline.text.tokenizer import Tokenizer


class Detokenizer:
    """Byte-exact incremental decoding (serving-api 1.3).

    The joined pieces equal the decoding of all ids at once, however the ids are cut (C2).
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that ``token_ids`` complete; bytes of an unfinished character are held back."""
        if self._hidden:
            token_ids = [token_id for token_id in token_ids if token_id not in self._hidden]
        return self._decoder.decode(self._tokenizer.token_bytes(token_ids))

    def finish(self) -> str:
        """What is still held back: one U+FFFD for an unfinished character, else nothing."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces.

    The match that ends first wins, so the cuts of the pieces never change the result.

    Attributes:
        matched: the stop string found, or None.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        self.matched: str | None = None
        self._stop = stop
        self._include = include
        self._held = ""

    def push(self, text: str) -> str:
        """Text that is surely shown; a possible beginning of a stop string is held back."""
        if self.matched is not None:
            return ""
        if not self._stop:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._include else start]
        begun = min([_find_begun(stop, text) for stop in self._stop])
        self._held = text[begun:]
        return text[:begun]

    def finish(self) -> str:
        """The beginning of a stop string that never became one."""
        held, self._held = self._held, ""
        return held


def _find_begun(stop: str, text: str) -> int:
    """Where the end of ``text`` begins to spell ``stop``; its length if nowhere."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)


class TextOutput:
    """Engine outputs of one choice -> the text that a client sees.

    Args:
        tokenizer: the checkpoint's.
        sampling: of the choice.
        stop_after: the id behind which stop strings are searched, such as the end of reasoning;
            None searches everywhere.

    Attributes:
        num_tokens: tokens generated so far, up to and with the one that completed a stop string.
        finish_reason: None while the choice runs. A stop string sets it before the engine does:
            the caller then closes its stream of outputs, which ends the request.
        stop_reason: the stop string or stop token id that ended the choice; None for the end
            token and for length.
    """

    def __init__(
        self, tokenizer: Tokenizer, sampling: SamplingParams, *, stop_after: int | None = None
    ) -> None:
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._stop_after = stop_after
        self._eos = tokenizer.eos_token_id
        self._sampling = sampling
        self._decoder = Detokenizer(tokenizer, skip_special_tokens=sampling.skip_special_tokens)
        self._stop = StopStrings(sampling.stop, include=sampling.include_stop_str_in_output)

    def push(self, output: TokenOutput) -> str:
        """The text that ``output`` releases; the whole rest when it ends the request."""
        text = ""
        shown = shown_token_ids(output, self._sampling, eos=self._eos)
        for token_id in shown:
            self.num_tokens += 1
            piece = self._decoder.push((token_id,))
            # Stop strings are not honoured before min_tokens (serving-api 9.1).
            if self._stop_after is None and self.num_tokens > self._sampling.min_tokens:
                piece = self._stop.push(piece)
            elif token_id == self._stop_after:
                self._stop_after = None
            text += piece
            if self._stop.matched is not None:
                self.finish_reason, self.stop_reason = FinishReason.STOP, self._stop.matched
                return text
        self.num_tokens += len(output.token_ids) - len(shown)
        if output.finish_reason is not None:
            text += self._stop.push(self._decoder.finish()) + self._stop.finish()
            self.finish_reason = output.finish_reason
            self.stop_reason = stop_token(output, eos=self._eos)
        return text


def shown_token_ids(output: TokenOutput, sampling: SamplingParams, *, eos: int) -> tuple[int, ...]:
    """The ids of ``output`` that may become text: all but a stop token that the client named.

    The end token stays: whether it is shown is for ``skip_special_tokens`` to say.
    """
    if output.stop_token_id in (None, eos) or sampling.include_stop_str_in_output:
        return output.token_ids
    return output.token_ids[:-1]


def stop_token(output: TokenOutput, *, eos: int) -> int | None:
    """The id that a client reads as ``stop_reason``: a stop token other than the end token."""
    return None if output.stop_token_id == eos else output.stop_token_id
