"""Engram: from token ids to table rows, and the injection into the streams (v41-model 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from leadline.config.model import ModelConfig
from leadline.core.errors import ConfigError
from leadline.kernels import ops
from leadline.kernels.reference.engram import DEAD
from leadline.models.batch import ForwardBatch
from leadline.models.common.parameters import Parameters
from leadline.models.common.side_stream import Fork, SideStream
from leadline.weights.source import EngramTable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LONE_SPACE = "\ue000"


def compressed_token_map(tokenizer: Tokenizer) -> list[int]:
    """Class of every token id: ids whose normalised text is equal share one (6.1).

    Args:
        tokenizer: the checkpoint's own.

    Returns:
        One integer per id; classes are numbered in order of first sight.
    """
    from tokenizers import Regex, normalizers

    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
    classes: dict[str, int] = {}
    token_map = []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        partial = "\ufffd" in text  # no whole character: the raw form of the token tells it apart
        key = tokenizer.id_to_token(token) if partial else normalizer.normalize_str(text) or text
        token_map.append(classes.setdefault(str(key), len(classes)))
    return token_map


def hash_primes(config: ModelConfig) -> list[list[int]]:
    """Primes of each Engram layer's columns, ascending and never used twice (6.2)."""
    primes: list[list[int]] = []
    candidate = config.engram_vocab_size
    for _ in config.engram_layer_ids:
        row: list[int] = []
        while len(row) < config.engram_columns:
            if _is_prime(candidate):
                row.append(candidate)
            candidate += 1
        primes.append(row)
    return primes


def hash_multipliers(config: ModelConfig) -> np.ndarray:
    """Odd int64 multipliers ``[layers, n]``; products of ids with them stay below 2^63 (6.2)."""
    bound = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
    size = config.engram_max_ngram_size
    rows = [
        2 * np.random.default_rng(10007 * layer).integers(0, bound, size=size, dtype=np.int64) + 1
        for layer in config.engram_layer_ids
    ]
    return np.stack(rows)


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    if number % 2 == 0:
        return False
    return all(number % divisor for divisor in range(3, int(number**0.5) + 1, 2))


class EngramHash:
    """Row ids of every Engram layer for the rows of a step, from token ids alone."""

    def __init__(
        self, config: ModelConfig, token_map: Sequence[int] | None, device: torch.device
    ) -> None:
        """Derive the constants and check them against the configuration.

        Args:
            config: the model.
            token_map: class of each token id; None takes ``id mod classes``, for models whose
                weights are random anyway.
            device: where the constants live.

        Raises:
            ConfigError: the tokenizer or the primes do not fit the configuration.
        """
        classes = config.engram_compressed_vocab_size
        if token_map is None:
            token_map = [token % classes for token in range(config.vocab_size)]
        found = len(set(token_map))
        if found != classes:
            raise ConfigError(
                f"the tokenizer's tokens fall into {found} Engram classes, but "
                f"engram_compressed_vocab_size is {classes}; tokenizer and config.json do not "
                "belong together"
            )
        primes = hash_primes(config)
        for layer, row, rows in zip(
            config.engram_layer_ids, primes, config.engram_num_embeddings, strict=True
        ):
            if sum(row) != rows:
                raise ConfigError(
                    f"engram_num_embeddings of layer {layer} is {rows}, but the hash primes from "
                    f"engram_vocab_size {config.engram_vocab_size} sum to {sum(row)}"
                )
        # Ids of the vocabulary that the tokenizer lacks have no class; a model may still draw one.
        undefined = [DEAD] * (config.vocab_size - len(token_map))
        self.pad = token_map[config.engram_pad_token_id]
        self.image_token_id = config.image_token_id
        self.token_map = torch.tensor([*token_map, *undefined], device=device)
        self.primes = torch.tensor(primes, device=device)
        self.offsets = self.primes.cumsum(1) - self.primes
        self.multipliers = torch.from_numpy(hash_multipliers(config)).to(device)

    def rows(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Table rows ``[m, layers, columns]`` int64, and ``[m]`` bool: no image, and no padding.

        Look-back never leaves the request: before a group's first row it reads ``batch.hist``.
        """
        history, live = ops.engram_history(
            batch.ids,
            batch.hist,
            batch.req_of_row,
            batch.q_off,
            self.token_map,
            pad=self.pad,
            image_token_id=self.image_token_id,
        )
        return ops.engram_hash(history, self.multipliers, self.primes, self.offsets), live


@dataclass(frozen=True, slots=True)
class NgramValues:
    """What the tables hold for the rows of a step; made by ``EngramPrefetch.start``.

    Attributes:
        of_layer: by Engram layer, ``[m, columns * head_dim]`` activations.
        live: ``[m]`` bool, which rows take part; there once any of those are.
    """

    of_layer: Mapping[int, Fork[Tensor]]
    live: Tensor

    @staticmethod
    def of(layers: Sequence[int], live: Tensor, *values: Tensor) -> NgramValues:
        """Those of ``tensors``, perhaps of some rows only."""
        return NgramValues(dict(zip(layers, map(Fork, values), strict=True)), live)

    def tensors(self, layers: Sequence[int]) -> tuple[Tensor, ...]:
        """``live`` and the values of these Engram layers, as plain tensors of the stream."""
        return self.live, *(self.wait(layer)[0] for layer in layers)

    def wait(self, layer: int) -> tuple[Tensor, Tensor]:
        """Values ``[m, columns * head_dim]`` of an Engram layer, and ``[m]`` bool.

        The device waits, and the host does not.
        """
        return self.of_layer[layer].join(), self.live


class EngramPrefetch:
    """Hashes and table rows of a step, beside the layers in front of them (kernels.md 12.2).

    Both depend on token ids alone. A stream of their own has the values of the first Engram layer
    while layer 0 runs, and those of the later ones long before they are wanted.
    """

    def __init__(
        self,
        engram_hash: EngramHash,
        tables: Sequence[EngramTable],
        device: torch.device,
        *,
        enabled: bool = True,
    ) -> None:
        """Take what the parts of the model have made.

        Args:
            engram_hash: of all Engram layers.
            tables: of each of them, in order.
            device: of the model.
            enabled: otherwise layers wait until all of it is there.
        """
        self.hash = engram_hash
        self._tables = tables
        # Some programs, which wait for the bus most of their time: they go first.
        self._side = SideStream(device, enabled=enabled, priority=-1)

    def start(self, batch: ForwardBatch) -> NgramValues:
        """Launch all of it, after what the current stream has been given so far."""
        hashed = self._side.fork(partial(self.hash.rows, batch))
        rows, live = hashed.value
        gathered = {
            layer: self._side.fork(partial(_gather, table, rows[:, layer]))
            for layer, table in enumerate(self._tables)
        }
        return NgramValues(gathered, live)


def _gather(table: EngramTable, rows: Tensor) -> Tensor:
    return table.gather(rows).flatten(1)


class Engram:
    """The injection at the start of an Engram layer (6.4)."""

    def __init__(self, params: Parameters, prefix: str, config: ModelConfig) -> None:
        self.eps = config.rms_norm_eps
        self.table = params.engram_table(f"{prefix}.embed")
        self.wkv = params.linear(f"{prefix}.wkv")
        self.q_weight = params.tensor(f"{prefix}.q_weight")
        self.k_weight = params.tensor(f"{prefix}.k_weight")

    def inject(self, streams: Tensor, values: Tensor, live: Tensor) -> Tensor:
        """Streams ``[m, S, D]`` with gathered values ``[m, columns * head_dim]`` added."""
        kv = ops.linear(values, self.wkv)
        return ops.engram_inject(streams, kv, self.q_weight, self.k_weight, live, eps=self.eps)
