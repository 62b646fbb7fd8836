"""Exercises and prose -> documents: ids, and how much predicting each of them counts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from leadline.eval.exercise import Chat, Exercise, Passage
from leadline.text.encoding import ChatEncoder
from leadline.text.markers import ASSISTANT, USER

# Answers are a small part of a chat's tokens, and all that it is judged by.
ANSWER_WEIGHT = 3.0
# What the model is never asked to write still teaches English, though most of it is drawn at
# random; the head of a prompt (effort, how to call tools) is the same every time and teaches none.
OTHER_TEXT_WEIGHT = 0.1
HEAD_WEIGHT = 0.02

Ids = npt.NDArray[np.uint16]
Weights = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens that belong together; the first is begin of sentence and is never predicted.

    Attributes:
        ids: ``[n]``.
        weights: ``[n]``, of the loss of each token, predicted from those before it.
    """

    ids: Ids
    weights: Weights

    def __len__(self) -> int:
        return len(self.ids)


def prose_document(ids: Ids, *, bos: int) -> Document:
    """A piece of encoded text, all of it to be learnt.

    Args:
        ids: a document that ends with end of sentence, or a part of one.
        bos: put in front.
    """
    weights = np.ones(len(ids) + 1, np.float32)
    weights[0] = 0.0
    return Document(np.concatenate((np.array([bos], ids.dtype), ids)), weights)


class DocumentEncoder:
    """Encodes exercises, chats as they are served."""

    def __init__(self, chats: ChatEncoder) -> None:
        self._chats = chats
        tokenizer = chats.tokenizer
        self.bos, self.eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self._user, self._assistant = tokenizer.marker_id(USER), tokenizer.marker_id(ASSISTANT)

    def encode(self, exercise: Exercise) -> Document:
        """A document of an exercise.

        Raises:
            BadRequest: a chat that cannot be rendered.
        """
        if isinstance(exercise, Chat):
            return self._chat(exercise)
        return prose_document(self.text(exercise), bos=self.bos)

    def text(self, passage: Passage) -> Ids:
        """Ids of a plain text and its end; markers in it stay text."""
        return np.array(
            [*self._chats.tokenizer.encode_texts([passage.text])[0], self.eos], np.uint16
        )

    def _chat(self, chat: Chat) -> Document:
        whole = chat.whole()
        # Past turns lose their reasoning where there are no tools; the last one is still to be
        # learnt with it, so to the encoder it is a turn that goes on, and its end is put behind.
        goes_on = chat.thinking and not chat.tools
        if goes_on:
            whole = replace(whole, continue_final_message=True)
        token_ids = self._chats.encode(whole).token_ids
        ids = np.array((*token_ids, self.eos) if goes_on else token_ids, np.uint16)
        return Document(ids, self._weights(ids))

    def _weights(self, ids: Ids) -> Weights:
        """Most from behind a turn's header to its end, less elsewhere, 0 for headers."""
        weights = np.full(len(ids), OTHER_TEXT_WEIGHT, np.float32)
        weights[: np.argmax(ids == self._user)] = HEAD_WEIGHT
        weights[0] = 0.0
        headers = np.flatnonzero(ids == self._assistant)  # each with a think marker behind it
        ends = np.flatnonzero(ids == self.eos)
        for header, end in zip(headers, ends, strict=True):
            weights[header : header + 2] = 0.0
            weights[header + 2 : end + 1] = ANSWER_WEIGHT
        return weights
