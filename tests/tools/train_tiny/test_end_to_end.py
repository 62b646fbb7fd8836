"""From text files to a served model, at the size of the rehearsal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from leadline import LLM, SamplingParams
from leadline.config.model import load_model_config
from leadline.tools.train_tiny import __main__ as command
from leadline.tools.train_tiny.checkpoints import load_weights
from leadline.tools.train_tiny.data import build_small
from leadline.tools.train_tiny.journal import read_journal
from leadline.tools.train_tiny.model import Transformer
from leadline.tools.train_tiny.official import export
from leadline.tools.train_tiny.recipes import RECIPES, REHEARSAL
from leadline.tools.train_tiny.runs import fitted

_PROSE = sorted((Path(__file__).parents[3] / "docs").glob("*.md"))
# Without draft stages: training them is a command of its own.
_CONFIG = replace(
    REHEARSAL.config,
    num_nextn_predict_layers=0,
    compress_ratios=REHEARSAL.config.compress_ratios[: REHEARSAL.config.num_hidden_layers],
)


@pytest.mark.slow
def test_what_is_trained_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, out, checkpoint = tmp_path / "data", tmp_path / "out", tmp_path / "checkpoint"
    monkeypatch.setitem(RECIPES, "rehearsal", replace(REHEARSAL, config=_CONFIG))
    build_small(data, _PROSE, _CONFIG)
    short = ["max_steps=6", "log_steps=2", "warmup_steps=1", "validate_seconds=1000", "seq_len=256"]
    short += ["micro_tokens=1024", "early_tokens=1024", "tokens_per_step=1024"]
    run = ["all", "--recipe=rehearsal", f"--data={data}", f"--out={out}"]
    settings = [f"--set={setting}" for setting in short]
    assert command.main([*run, f"--state={tmp_path / 'state.pt'}", *settings]) == 0
    for number in (1, 2, 3):
        lines = read_journal(out / f"stage-{number}" / "log.jsonl")
        assert [line["kind"] for line in lines] == ["start", *["train"] * 3, "validation"]
        assert lines[0]["before"]["stage"] == number - 1
    assert lines[-2]["loss"] < 6.5  # from log(1024), 6.93

    config, token_map = fitted(_CONFIG, data)
    model = Transformer(config, token_map)
    progress = load_weights(out / "stage-3" / "weights", model)
    assert (progress.steps, progress.is_quantized) == (18, True)
    export(checkpoint, config, model.state_dict(), tokenizer=data / "tokenizer.json")
    assert load_model_config(checkpoint) == config
    with LLM(checkpoint, kv_cache_memory_bytes=16 * 2**20, max_num_seqs=2) as llm:
        (answer,) = llm.generate("box 4; door 7; box", SamplingParams(max_tokens=4))
    assert len(answer.outputs[0].token_ids) > 0
