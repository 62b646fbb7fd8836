"""Write a seeded random checkpoint of any configuration, in the official layout.

    python -m leadline.tools.random_checkpoint OUT --preset tiny-window128 --shards 2

The same weights come from ``--load-format dummy`` with the same seed.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from pathlib import Path

from leadline.config.families import AnyConfig, load_any_config, quantized
from leadline.config.presets import PRESETS, any_preset
from leadline.core.errors import ConfigError
from leadline.tools.checkpoint_writer import write_checkpoint
from leadline.weights.random_init import random_tensors


def write_random_checkpoint(
    out: Path,
    config: AnyConfig,
    *,
    seed: int = 0,
    num_shards: int = 1,
    tokenizer: Path | None = None,
    plain: bool = False,
) -> None:
    """Write backbone and draft weights, ``config.json`` and perhaps an index and a tokenizer.

    Args:
        out: the folder; made if need be. Must not hold a checkpoint already.
        config: the model.
        seed: every weight follows from it and from the weight's name.
        num_shards: files; one is called ``model.safetensors``, more come with an index.
        tokenizer: a ``tokenizer.json`` to copy.
        plain: bf16 matrices without scales in place of the packed formats.

    Raises:
        ConfigError: ``num_shards`` fits no checkpoint of this size, or ``out`` holds one.
    """
    config = dataclasses.replace(config, quantization_config=None) if plain else quantized(config)
    write_checkpoint(
        out,
        config,
        lambda spec: random_tensors(spec, seed=seed, plain=plain),
        num_shards=num_shards,
        tokenizer=tokenizer,
    )


def main(argv: Iterable[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m leadline.tools.random_checkpoint", description=__doc__.splitlines()[0]
    )
    parser.add_argument("out", type=Path, help="folder to write")
    shape = parser.add_mutually_exclusive_group(required=True)
    shape.add_argument("--preset", choices=PRESETS, help="a named configuration")
    shape.add_argument("--config", type=Path, help="a config.json, or a folder with one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1, help="files to write (default 1)")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json to copy")
    parser.add_argument("--plain", action="store_true", help="bf16 matrices without scales")
    args = parser.parse_args(None if argv is None else list(argv))
    try:
        config = any_preset(args.preset) if args.preset else load_any_config(args.config)
        write_random_checkpoint(
            args.out,
            config,
            seed=args.seed,
            num_shards=args.shards,
            tokenizer=args.tokenizer,
            plain=args.plain,
        )
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
