"""Sampling: logits to token ids, and how likely these were (serving-api 9.1, 9.3, kernels.md 14).

Every function works on rows that do not see each other, in float64 from the first division on, so
that a draw depends on its own row, its parameters and its uniform number only. A row without a
valid distribution (a NaN, an infinite maximum, nothing allowed) yields the token -1.
"""

# Shapes: R rows, V vocabulary, N as each function says

from __future__ import annotations

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
# The additive constant and the two multipliers of the splitmix64 generator.
_STRIDE, _MUL1, _MUL2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def counter_uniform(seed: int, position: int) -> float:
    """The uniform number in [0, 1) of one draw: a hash of a 64-bit seed and a position.

    Counter-based: no state, so neighbours in the batch, preemption and the device change nothing.
    52 bits, so that times any total of probabilities it stays below that total.
    """
    return (_mix64(_mix64(seed) + position * _STRIDE) >> 12) * 2.0**-52


def _mix64(value: int) -> int:
    value &= _MASK64
    value = ((value ^ (value >> 30)) * _MUL1) & _MASK64
    value = ((value ^ (value >> 27)) * _MUL2) & _MASK64
    return value ^ (value >> 31)


def apply_bitmask(logits_RV: Tensor, row_N: Tensor, words_NW: Tensor) -> None:
    """Forbid ids, in place: where their bit is not set, logits become -inf (serving-api 9.4).

    Args:
        logits_RV: ``[R, V]`` float32 or float64, contiguous.
        row_N: ``[N]`` int64, different rows; the others stay as they are.
        words_NW: ``[N, ceil(V / 32)]`` int32, contiguous; id i has bit i % 32 of word i // 32.
    """
    bits = torch.arange(32, dtype=torch.int32, device=words_NW.device)
    allowed_NV = (words_NW[:, :, None] >> bits & 1).bool().flatten(1)[:, : logits_RV.shape[1]]
    logits_RV[row_N] = logits_RV[row_N].masked_fill(~allowed_NV, -torch.inf)


def apply_penalties(
    logits_RV: Tensor,
    row_N: Tensor,
    id_N: Tensor,
    count_N: Tensor,
    *,
    presence_R: Tensor,
    frequency_R: Tensor,
    repetition_R: Tensor,
) -> None:
    """Penalise what was said, in place: repetition divides or multiplies, the others subtract.

    Args:
        logits_RV: ``[R, V]`` float32 or float64, contiguous.
        row_N: ``[N]`` int64, rows of what was said.
        id_N: ``[N]`` int64, ids of the row's prompt or generated tokens; each once a row.
        count_N: ``[N]`` int64, how often the id was generated.
        presence_R: ``[R]``, subtracted once from ids that were generated.
        frequency_R: ``[R]``, subtracted once per generated occurrence.
        repetition_R: ``[R]``, above 0: moves the logits of what was said down when above 1.
    """
    logit_N, factor_N = logits_RV[row_N, id_N], repetition_R[row_N]
    logit_N = torch.where(logit_N > 0, logit_N / factor_N, logit_N * factor_N)
    logit_N = logit_N - frequency_R[row_N] * count_N
    logits_RV[row_N, id_N] = logit_N - presence_R[row_N] * (count_N > 0)


def greedy(logits_RV: Tensor) -> Tensor:
    """The best id of every row, the smallest among equals: ``[R]`` int64, -1 where invalid."""
    if logits_RV.device.type == "cpu":
        # torch's argmax is scalar on a CPU: 60 us for 8 x 4096 where numpy takes 3.
        best_R = torch.from_numpy(logits_RV.numpy().argmax(-1))
    else:
        best_R = logits_RV.argmax(-1)
    value_R = logits_RV.gather(-1, best_R[:, None])[:, 0]
    return torch.where(value_R.isfinite(), best_R, -1)


def sample(
    logits_RV: Tensor,
    *,
    temperature_R: Tensor,
    min_p_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    uniform_R: Tensor,
) -> Tensor:
    """Draw one id per row: temperature, min_p, top_k, top_p, then the inverse of the CDF.

    The CDF runs in the order of the vocabulary, so the draw does not depend on how ids were
    sorted in between.

    Args:
        logits_RV: ``[R, V]`` float32 or float64; masked ids are -inf.
        temperature_R: ``[R]`` float64, above 0.
        min_p_R: ``[R]`` float64; ids less likely than this share of the best are dropped.
        top_k_R: ``[R]`` int64; 0 or below is off. Of equals at the end the smaller ids stay.
        top_p_R: ``[R]`` float64; the fewest ids whose mass reaches this share of what is left.
        uniform_R: ``[R]`` float64 in [0, 1).

    Returns:
        ``[R]`` int64, -1 where invalid.
    """
    probs_RV = torch.softmax(logits_RV.double() / temperature_R[:, None], dim=-1)
    best_R1 = probs_RV.amax(-1, keepdim=True)
    probs_RV = torch.where(probs_RV >= min_p_R[:, None] * best_R1, probs_RV, 0.0)

    sorts_R = (top_k_R > 0) | (top_p_R < 1)
    if sorts_R.any():
        probs_RV[sorts_R] = _keep_top(probs_RV[sorts_R], top_k_R[sorts_R], top_p_R[sorts_R])

    cdf_RV = probs_RV.cumsum(-1)
    total_R1 = cdf_RV[:, -1:]
    # The first entry above the target has a share of its own, so dropped ids are never drawn.
    token_R = torch.searchsorted(cdf_RV, uniform_R[:, None] * total_R1, right=True)[:, 0]
    # NaN logits, +inf and rows of nothing but -inf all end as a NaN softmax, hence best_R1.
    return torch.where(best_R1[:, 0] > 0, token_R, -1)


def _keep_top(probs_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """Zero everything but the k best, then all but the head that holds a share p of them."""
    vocab = probs_RV.shape[-1]
    sorted_RV = _sort_descending(probs_RV)
    mass_RV = sorted_RV.cumsum(-1)
    count_R1 = torch.where(top_k_R > 0, top_k_R.clamp(max=vocab), vocab)[:, None]
    share_R1 = top_p_R[:, None]
    target_R1 = share_R1 * mass_RV.gather(-1, count_R1 - 1)
    # At p = 1 rounding of the mass must not drop the tail.
    head_RV = (share_R1 >= 1) | (mass_RV - sorted_RV < target_R1)
    head_RV &= torch.arange(vocab, device=probs_RV.device) < count_R1
    # A p so small that the target rounds to 0 still leaves the best.
    num_kept_R1 = head_RV.sum(-1, keepdim=True).clamp(min=1)

    last_R1 = sorted_RV.gather(-1, num_kept_R1 - 1)
    return torch.where(_down_to(last_R1, num_kept_R1, probs_RV), probs_RV, 0.0)


def _down_to(last_R1: Tensor, count_R1: Tensor | int, values_RV: Tensor) -> Tensor:
    """``[R, V]`` bool: the ``count`` largest, down to ``last``, of which the smaller ids."""
    above_RV, equal_RV = values_RV > last_R1, values_RV == last_R1
    num_equal_R1 = count_R1 - above_RV.sum(-1, keepdim=True)
    return above_RV | (equal_RV & (equal_RV.cumsum(-1) <= num_equal_R1))


def _sort_descending(values_RV: Tensor) -> Tensor:
    if values_RV.device.type == "cpu":
        # 8 x 4096: 2.1 ms in torch, 0.1 ms in numpy.
        values = values_RV.numpy().copy()
        values.sort(axis=-1)
        return torch.from_numpy(values).flip(-1)
    return values_RV.sort(dim=-1, descending=True).values


def logprobs(
    logits_RV: Tensor, token_R: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of each row's token, with its rank, and of the best ids (serving-api 9.3).

    Of equal logits the smaller id stands first, as ``greedy`` picks it.

    Args:
        logits_RV: ``[R, V]`` float32 or float64: the model's own, before temperature and masks.
        token_R: ``[R]`` int64 in 0..V-1.
        count: how many of the best, at most V.

    Returns:
        ``[R]`` float64 of the tokens, ``[R]`` int64 ranks from 1, ``[R, count]`` float64 of the
        best, descending, and their ``[R, count]`` int64 ids. A row without a valid distribution has
        NaN everywhere, and ranks and ids that mean nothing, though they are in range.
    """
    values_RV = logits_RV.double().log_softmax(-1)
    logits_RV = logits_RV.nan_to_num(torch.inf, torch.inf, -torch.inf)
    token_R1 = token_R[:, None]
    chosen_R1 = logits_RV.gather(-1, token_R1)
    is_before_RV = torch.arange(logits_RV.shape[-1], device=logits_RV.device) < token_R1
    ahead_RV = (logits_RV > chosen_R1) | ((logits_RV == chosen_R1) & is_before_RV)
    best_RN = _best(logits_RV, count)
    return (
        values_RV.gather(-1, token_R1)[:, 0],
        1 + ahead_RV.sum(-1),
        values_RV.gather(-1, best_RN),
        best_RN,
    )


def _best(logits_RV: Tensor, count: int) -> Tensor:
    """``[R, count]`` ids of the largest, in order."""
    # topk takes any of equals. To sort whole rows would take twenty times as long on a CPU.
    last_R1 = logits_RV.topk(max(count, 1)).values[:, -1:]
    kept_RV = _down_to(last_R1, count, logits_RV)
    id_RN = kept_RV.nonzero()[:, 1].view(len(logits_RV), count)
    order_RN = logits_RV.gather(-1, id_RN).sort(stable=True, dim=-1, descending=True).indices
    return id_RN.gather(-1, order_RN)
