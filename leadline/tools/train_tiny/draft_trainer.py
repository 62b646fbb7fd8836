"""What a draft head learns from a frozen backbone, and how much of what it drafts is accepted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from leadline.tools.train_tiny.batch import Batch
from leadline.tools.train_tiny.blocks import Blocks, choose_blocks
from leadline.tools.train_tiny.draft import Draft, Drafted
from leadline.tools.train_tiny.layers import Compiler, rms_norm
from leadline.tools.train_tiny.model import PROBES, Losses, Phase, Transformer
from leadline.tools.train_tiny.official import parameter_formats
from leadline.tools.train_tiny.recipes import Recipe
from leadline.tools.train_tiny.replicas import Replicas
from leadline.tools.train_tiny.rows import Rows
from leadline.tools.train_tiny.trainer import Trainer

# A block each so many tokens: beside the backbone's pass over all of them, blocks cost little.
_TOKENS_PER_BLOCK = 16
# A later slot matters less: all slots before it have to be accepted first.
_SLOT_DECAY = 0.8
# The backbone as it is served; what it quantises, its head quantises too.
_SERVED = Phase(sparse=True, quantize=True, index_loss=False)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Greedy drafts of one family against the target model's greedy tokens.

    Every slot is teacher-forced: both models read the true text in front of it. In service they
    read the accepted drafts, which are the target's own tokens; where those are not the text's the
    figures are an estimate.

    Attributes:
        blocks: counted, those that begin in text that weighs 1 or more; they end with it.
        length: mean number of drafts that are accepted of a block, up to ``dspark_block_size``.
        by_slot: share of each slot's drafts that are the target's tokens.
        given_earlier: the same among slots before which all are accepted.
        confidence: what the head expected ``given_earlier`` to be.
        loss: as trained.
    """

    blocks: int
    length: float
    by_slot: list[float]
    given_earlier: list[float]
    confidence: list[float]
    loss: float


class DraftTrainer(Trainer):
    """Trains a head on what a backbone makes of batches.

    ``Phase.quantize`` is the head's own weights; activations and caches always are quantised.

    Args:
        draft: with the values to start from, on its device.
        backbone: on the same; its weights are those that files hold.
        recipe: learning rates and the like.
        replicas: those who train the same head on other rows.
    """

    def __init__(
        self, draft: Draft, backbone: Transformer, recipe: Recipe, *, replicas: Replicas
    ) -> None:
        super().__init__(draft, parameter_formats(draft.config), recipe, replicas=replicas)
        self._draft, self._backbone = draft, backbone
        self._anchors = torch.Generator(self.device).manual_seed(recipe.seed + replicas.rank)

    def forward(self, batch: Batch, phase: Phase) -> Losses:
        """Losses of the head; it has no indexers."""
        blocks, drafted, target_logits = self._read(batch, self._anchors)
        loss = draft_loss(drafted, target_logits, blocks, self._draft.compiled)
        none = torch.zeros_like(loss)
        return Losses(
            loss=loss, index_loss=none, expert_counts=drafted.expert_counts, index_mass=none
        )

    def evaluate(self, held_out: Mapping[str, Batch], phase: Phase) -> dict[str, dict[str, float]]:
        """Family -> loss and mean accepted length on its batch."""
        return {
            family: {"answers": found.loss, "accepted_length": found.length}
            for family, found in self.acceptance(held_out).items()
        }

    def acceptance(self, held_out: Mapping[str, Batch]) -> dict[str, Acceptance]:
        """Family -> figures of its batch, of the same blocks every time."""
        generator = torch.Generator(self.device).manual_seed(0)
        result = {}
        for family, batch in held_out.items():
            # With gradients, though nothing needs them: compiled code is that of training then.
            blocks, drafted, target_logits = self._read(batch, generator)
            loss = draft_loss(drafted, target_logits, blocks, self._draft.compiled)
            result[family] = acceptance(blocks, drafted, target_logits, loss)
        return result

    def _read(self, batch: Batch, generator: torch.Generator) -> tuple[Blocks, Drafted, Tensor]:
        """Blocks of a batch, what the head drafts, and the backbone's logits of the same tokens."""
        backbone, config = self._backbone, self._draft.config
        rows = Rows(batch, config, PROBES)
        blocks = choose_blocks(
            batch, config, max(1, batch.ids.shape[1] // _TOKENS_PER_BLOCK), generator
        )
        # As in training, with gradients that end here: what torch.compile makes of the same
        # functions without them gave NaN on a GPU, not on every run (torch 2.11).
        hidden = backbone.hidden(rows, _SERVED)
        features = [feature.detach() for feature in hidden.features]
        normed = rms_norm(
            hidden.rows.detach()[blocks.rows], backbone.norm.weight.detach(), config.rms_norm_eps
        )
        target_logits = F.linear(normed.float(), backbone.head.weight.detach().float())
        cos, sin = rows.plain
        turns = (cos.flatten(0, 1), sin.flatten(0, 1))
        drafted = self._draft(backbone, features, turns, blocks, quantize=_SERVED.quantize)
        return blocks, drafted, target_logits


def draft_loss(
    drafted: Drafted, target_logits: Tensor, blocks: Blocks, compiler: Compiler
) -> Tensor:
    """Mean loss of a slot, weighted as the text is and less for later slots.

    Cross entropy of the text; total variation distance from the target model's distribution, which
    is the share of sampled drafts that are rejected; and cross entropy of the confidence.

    Args:
        drafted: of the blocks.
        target_logits: ``[n, slots, V]`` float32.
        blocks: targets and weights.
        compiler: of the head.
    """
    slots = torch.arange(blocks.weights.shape[1], device=blocks.weights.device)
    weights = blocks.weights * _SLOT_DECAY**slots
    losses = compiler(_slot_losses)(
        drafted.logits, drafted.confidence, target_logits, blocks.targets
    )
    return (losses * weights).sum() / weights.sum().clamp(min=1e-6)


def _slot_losses(
    logits: Tensor, confidence: Tensor, target_logits: Tensor, targets: Tensor
) -> Tensor:
    log_probs = logits.log_softmax(-1)
    surprise = -log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    distance = (log_probs.exp() - target_logits.softmax(-1)).abs().sum(-1) / 2
    greedy = target_logits.argmax(-1)
    accepted = logits.argmax(-1) == greedy
    # A slot is reached in service after accepted drafts; here the text stands in front of it, so
    # only where they are the same is its confidence judged.
    on_text = accepted & (greedy == targets)
    doubt = F.binary_cross_entropy_with_logits(confidence, accepted.float(), reduction="none")
    return surprise + distance + doubt * _all_before(on_text)


def _all_before(flags: Tensor) -> Tensor:
    """``[n, slots]`` bool: whether all slots before each are set."""
    return F.pad(flags[:, :-1].int(), (1, 0), value=1).cumprod(1) > 0


def acceptance(blocks: Blocks, drafted: Drafted, target_logits: Tensor, loss: Tensor) -> Acceptance:
    """Figures of blocks; the logits are those of the same slots, ``[n, slots, V]``."""
    counted = (blocks.weights >= 1).int().cumprod(1) > 0
    accepted = counted & (drafted.logits.argmax(-1) == target_logits.argmax(-1))
    reached = counted & _all_before(accepted)
    num_reached = reached.sum(0).clamp(min=1)
    rows = torch.stack(
        (
            accepted.sum(0) / counted.sum(0).clamp(min=1),
            (accepted & reached).sum(0) / num_reached,
            (drafted.confidence.detach().sigmoid() * reached).sum(0) / num_reached,
        )
    )
    num_blocks = counted[:, 0].sum()
    by_slot, given_earlier, confidence = rows.tolist()
    return Acceptance(
        blocks=int(num_blocks),
        length=float((accepted & reached).sum() / num_blocks.clamp(min=1)),
        by_slot=by_slot,
        given_earlier=given_earlier,
        confidence=confidence,
        loss=loss.item(),
    )
