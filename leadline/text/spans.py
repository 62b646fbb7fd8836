"""A prompt as spans: markers that the encoder wrote, text that anybody wrote, ids (C1)."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable
from typing import TypeAlias

from leadline.text.tokenizer import Tokenizer


class Marker(str):
    """A control token of the prompt format, by its spelling; never made from a client's text."""

    __slots__ = ()


Ids: TypeAlias = "array[int]"
Span: TypeAlias = "Marker | str | Ids"


def encode_spans(tokenizer: Tokenizer, spans: Iterable[Span]) -> list[int]:
    """Ids of a prompt.

    Neighbouring texts are encoded as one, because merges may cross their join; nothing is merged
    across a marker or across ids (serving-api 1.2).
    """
    pieces: list[int | Ids | None] = []  # None stands for the next text
    texts: list[str] = []
    for kind, group in itertools.groupby(spans, type):
        if kind is str:
            texts.append("".join(group))  # type: ignore[arg-type]
            pieces.append(None)
        elif kind is Marker:
            pieces.extend(tokenizer.marker_id(marker) for marker in group)  # type: ignore[arg-type]
        else:
            pieces.extend(group)  # type: ignore[arg-type]
    encoded = iter(tokenizer.encode_texts(texts))
    ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, int):
            ids.append(piece)
        else:
            ids.extend(next(encoded) if piece is None else piece)
    return ids
