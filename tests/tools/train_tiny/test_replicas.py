"""Data parallel training."""

from __future__ import annotations

import os
import socket
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import multiprocessing

from leadline.tools.train_tiny.batch import Batch
from leadline.tools.train_tiny.model import Phase
from leadline.tools.train_tiny.recipes import REHEARSAL
from leadline.tools.train_tiny.replicas import Replicas, joined
from leadline.tools.train_tiny.trainer import Trainer
from tests.tools.train_tiny.standin import LENGTH, ROWS, SPECS, StandIn, batches

_STEPS = 3


def some_batches() -> list[Batch]:
    torch.manual_seed(5)
    return list(islice(batches(), 2 * _STEPS))


def train(replicas: Replicas, rows: list[Batch], passes: int) -> Trainer:
    torch.manual_seed(0)
    trainer = Trainer(StandIn(), SPECS, REHEARSAL, replicas=replicas)
    stream = iter(rows)
    for _ in range(_STEPS):
        trainer.step(stream, Phase(), passes=passes, lr_factor=1.0)
    return trainer


def work(rank: int, port: int, folder: Path) -> None:
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with joined(torch.device("cpu")) as (replicas, _):
        assert replicas.agree(float(rank + 7)) == 7.0
        trainer = train(replicas, some_batches()[rank::2], passes=1)
        assert trainer.tokens == 2 * _STEPS * ROWS * LENGTH
        torch.save(trainer.state_dict()["masters"], folder / f"{rank}.pt")


@pytest.mark.slow
def test_two_replicas_train_the_model_that_one_would_on_all_rows(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(work, (port, tmp_path), nprocs=2)
    alone = train(Replicas(), some_batches(), passes=2).state_dict()["masters"]
    for rank in (0, 1):
        masters = torch.load(tmp_path / f"{rank}.pt")
        for name, value in alone.items():
            torch.testing.assert_close(masters[name], value, atol=1e-4, rtol=1e-3)


def test_a_process_alone_agrees_with_itself() -> None:
    with joined(torch.device("cpu")) as (replicas, device):
        assert (replicas, device) == (Replicas(), torch.device("cpu"))
        assert replicas.agree(3.5) == 3.5
