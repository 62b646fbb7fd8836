"""What one answer tells, alone and against the reference's on the same question."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leadline.eval.questions import Dialogue
from leadline.eval.runner import Outcome


@dataclass(frozen=True, slots=True)
class Record:
    """One question in one arm.

    Attributes:
        dialogue: its number; questions of one dialogue are not independent.
        correct: whether the model's own answer is right; None where none is judged.
        parses: whether its calls or its JSON do; None for free text.
        nll: of the right answer, nats per token; this and what follows is None where another
            server's model is asked.
        bits_per_byte: of the right answer, where it is prose.
        kl_window: KL(reference || arm) of the next token, nats, mean over the first window of the
            answer.
        kl: the same over the whole answer.
        flips: share of its tokens where the two prefer different ones.
        num_cached: prompt tokens that the prefix cache knew.
        num_replayed: of these, the ones that were fed again.
    """

    family: str
    cell: str
    dialogue: int
    correct: bool | None
    parses: bool | None
    nll: float | None = None
    bits_per_byte: float | None = None
    kl_window: float | None = None
    kl: float | None = None
    flips: float | None = None
    num_cached: int | None = None
    num_replayed: int | None = None


def measure(
    dialogue: Dialogue, place: int, outcome: Outcome, reference: Outcome, *, window: int
) -> Record:
    """The record of a dialogue's question ``place``; ``window`` is the model's, in tokens."""
    question = dialogue.questions[place]
    expectation, answer = question.expectation, outcome.answer
    gold = torch.tensor(question.gold)[:, None]
    nll = -float(outcome.logprobs.gather(1, gold).double().mean())
    kl = divergence(reference.logprobs, outcome.logprobs)
    flips = reference.logprobs.argmax(-1) != outcome.logprobs.argmax(-1)
    num_bits = nll * len(question.gold) / math.log(2)
    return Record(
        family=dialogue.family,
        cell=question.cell,
        dialogue=dialogue.number,
        correct=expectation.is_met(answer) if expectation and answer else None,
        parses=expectation.parses(answer) if expectation and answer else None,
        nll=nll,
        bits_per_byte=num_bits / question.num_bytes if question.num_bytes else None,
        kl_window=float(kl[:window].mean()),
        kl=float(kl.mean()),
        flips=float(flips.double().mean()),
        num_cached=outcome.num_cached,
        num_replayed=outcome.num_replayed,
    )


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) in nats of each row of log-probabilities ``[n, V]``: float64 ``[n]``."""
    p, q = p.double(), q.double()
    return (p.exp() * (p - q)).sum(-1)
