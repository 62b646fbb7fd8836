"""Float32 masters behind a model's compute weights, stacked so that a step is a few launches."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leadline.tools.train_tiny.official import round_weight
from leadline.weights.table import WeightSpec

# The matrices of hidden layers; everything else is an embedding, a head, a vector or a small mixer.
_MATRIX = re.compile(r"\.(wq_a|wq_b|wkv|wo_a|wo_b|wgate|wk|w1|w2|w3|main_proj)\.weight$")

# Small matrices over normalised inputs, for AdamW: the router's, the streams' and the indexers'.
_MIXER = re.compile(r"(\.gate\.weight|_fn|\.weights_proj\.weight)$")
# Inputs of a mixer up to which it takes the whole learning rate.
_MIXER_INPUTS = 32


@dataclass(frozen=True, slots=True)
class Group:
    """Weights that share shape, format and optimiser.

    Attributes:
        names: of the parameters, in the order of the stack.
        parameters: what the model computes with; ``[*shape]`` each.
        master: float32 ``[len(names), *shape]``, the values that are trained.
        is_matrix: belongs to Muon; a parameter is a matrix or a stack of matrices.
        spec: of one of them; they share its format.
    """

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    master: nn.Parameter
    is_matrix: bool
    spec: WeightSpec

    @property
    def lr_scale(self) -> float:
        """What AdamW's learning rate is multiplied with.

        A step of Adam moves each value by the rate, so an output by up to the rate times the
        number of inputs: wide mixers would saturate before the balance of experts can follow.
        """
        is_mixer = _MIXER.search(self.names[0]) is not None
        return min(1.0, _MIXER_INPUTS / self.master.shape[-1]) if is_mixer else 1.0


class Masters:
    """The masters of all of a model's parameters, in groups.

    Args:
        model: its parameters are named as official weights, experts stacked, and hold the values
            to start from.
        specs: ``official.parameter_formats`` of the configuration.
    """

    def __init__(self, model: nn.Module, specs: Mapping[str, WeightSpec]) -> None:
        alike: defaultdict[tuple[object, ...], list[str]] = defaultdict(list)
        parameters = dict(model.named_parameters())
        for name, parameter in parameters.items():
            spec = specs[name]
            kind = (_is_matrix(name), _MIXER.search(name) is not None)
            alike[kind, spec.format, spec.dtype, parameter.shape].append(name)
        self.groups = [
            Group(
                names=tuple(names),
                parameters=tuple(parameters[name] for name in names),
                master=nn.Parameter(torch.stack([parameters[n].detach().float() for n in names])),
                is_matrix=_is_matrix(names[0]),
                spec=specs[names[0]],
            )
            for names in alike.values()
        ]

    def collect_gradients(self) -> list[Tensor]:
        """Move the parameters' gradients to the masters, as float32; the parameters' are gone.

        A parameter that the loss did not reach counts as one with a gradient of zero.
        """
        gradients = []
        for group in self.groups:
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in group.parameters]
            group.master.grad = torch.stack(parts).float()
            gradients.append(group.master.grad)
            for parameter in group.parameters:
                parameter.grad = None
        return gradients

    @torch.no_grad()
    def publish(self, *, quantize: bool) -> None:
        """Give the model the masters' values, cast, and first quantised where asked for.

        Gradients of quantised weights go to the masters unchanged (straight through).
        """
        for group in self.groups:
            values = round_weight(group.master, group.spec) if quantize else group.master
            torch._foreach_copy_(list(group.parameters), list(values.unbind()))

    def state_dict(self) -> dict[str, Tensor]:
        """Every parameter's master by name."""
        return {
            name: value
            for group in self.groups
            for name, value in zip(group.names, group.master.detach().unbind(), strict=True)
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of ``state_dict``."""
        for group in self.groups:
            group.master.copy_(torch.stack([state[name] for name in group.names]))


def _is_matrix(name: str) -> bool:
    return _MATRIX.search(name) is not None
