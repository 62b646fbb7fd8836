"""Ids <-> text and bytes, by the checkpoint's own ``tokenizer.json``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from leadline.core.errors import ConfigError

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
FIM_BEGIN, FIM_HOLE, FIM_END = "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """A byte-level BPE tokenizer (serving-api 1).

    Marker ids are looked up by their text, never assumed. ``encode`` uses the whole added
    vocabulary, which is right for raw prompts only; chat prompts go through ``encode_texts``,
    where a marker that a user types stays text (C1).

    Attributes:
        path: the file it was read from.
        added_ids: ids of all added tokens: markers and placeholders, no ordinary text.
        special_ids: those that the file flags as special, by far not all markers.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises the bare class
            raise ConfigError(f"{path}: not a readable tokenizer.json ({error})") from error
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.added_ids = frozenset(added)
        self._bytes = _TokenBytes(self._tokenizer, self.added_ids)

    @property
    def vocab_size(self) -> int:
        """Number of ids that have a text; the model's own vocabulary may be larger."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def marker_id(self, marker: str) -> int:
        """Id of a marker such as ``<think>``.

        Raises:
            ConfigError: the tokenizer has no such token.
        """
        token_id = self._tokenizer.token_to_id(marker)
        if token_id is None:
            raise ConfigError(
                f"{self.path}: the tokenizer has no token {marker}; serve the checkpoint with the "
                "tokenizer.json that came with it"
            )
        return token_id

    def has_markers(self, *markers: str) -> bool:
        """Whether every marker has an id."""
        return all(self._tokenizer.token_to_id(marker) is not None for marker in markers)

    @property
    def bos_token_id(self) -> int:
        return self.marker_id(BOS)

    @property
    def eos_token_id(self) -> int:
        return self.marker_id(EOS)

    def encode(self, text: str) -> list[int]:
        """Ids of a raw text; markers in it become their ids, nothing is added."""
        # The batch call lets other threads run meanwhile; the plain one does not.
        texts = [well_formed(text)]
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)[0].ids

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts, each on its own; no text becomes a marker (C1)."""
        texts = [well_formed(text) for text in texts]
        encoded = self._text_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    @cached_property
    def _text_tokenizer(self) -> tokenizers.Tokenizer:
        """Without added tokens. The library's own switch covers those flagged special only, and
        most markers are not (serving-api 1.1)."""
        definition = json.loads(self._tokenizer.to_str())
        definition["added_tokens"] = []
        return tokenizers.Tokenizer.from_str(json.dumps(definition))

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a raw prompt: BOS once, whether or not the text begins with it (serving-api 6)."""
        ids = self.encode(text)
        return ids if ids[:1] == [self.bos_token_id] else [self.bos_token_id, *ids]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of ids with every marker shown; bytes that are no UTF-8 become U+FFFD."""
        return self.token_bytes(token_ids).decode("utf-8", "replace")

    def token_bytes(self, token_ids: Iterable[int]) -> bytes:
        """The exact bytes of ids; an id without a text has none."""
        return b"".join([self._bytes[token_id] for token_id in token_ids])


def well_formed(text: str) -> str:
    """A text that has a UTF-8 form: half a surrogate pair becomes U+FFFD (C51)."""
    return _LONE_SURROGATE.sub("\ufffd", text)


class _TokenBytes(dict[int, bytes]):
    """Id -> bytes, filled as ids are met: a vocabulary has 129,280, an answer a few hundred."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, added: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._added = added

    def __missing__(self, token_id: int) -> bytes:
        text = self._tokenizer.id_to_token(token_id) or ""
        if token_id in self._added:
            raw = text.encode()
        else:
            raw = bytes(_BYTE_OF_CHARACTER[character] for character in text)
        self[token_id] = raw
        return raw


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself, or one from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    moved: Sequence[tuple[str, int]] = [(chr(256 + i), byte) for i, byte in enumerate(others)]
    return {chr(byte): byte for byte in printable} | dict(moved)


_BYTE_OF_CHARACTER = _byte_alphabet()
