"""A tokenizer of single characters for ``FakeModel``'s vocabulary, and grammars over it."""

from __future__ import annotations

import json
from pathlib import Path

from leadline.engine.grammar import TokenizerFile
from tests.fakes import EOS, FIRST_ID, VOCAB_SIZE

CHARACTERS = 'abcdefghijklmnopqrstuvwxyz0123456789{}[]":,.-_ABCDEFGHIJKLMNOPQRSTUVWXYZ!?+*='
ID_OF = {character: FIRST_ID + i for i, character in enumerate(CHARACTERS)}
THINK_END = 3  # markers, which no text spells
TOOL = 4
NAMED = {0: "<pad>", EOS: "<eos>", 2: "<think>", THINK_END: "</think>", TOOL: "｜tool｜"}
MARKERS = {i: f"<unused{i}>" for i in range(FIRST_ID)} | NAMED


def ids_of(text: str) -> list[int]:
    return [ID_OF[character] for character in text]


def text_of(token_ids: list[int] | tuple[int, ...]) -> str:
    """Ordinary tokens as their characters, others by their names."""
    names = {i: character for character, i in ID_OF.items()} | MARKERS
    return "".join(names[token_id] for token_id in token_ids)


def write_tokenizer(folder: Path) -> TokenizerFile:
    """Write ``tokenizer.json`` and say what the engine needs to know of it."""
    path = folder / "tokenizer.json"
    added = {name: i for i, name in MARKERS.items()}
    content = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": i,
                "content": name,
                "special": i == EOS,  # as in released files, where markers of tools are not
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for name, i in added.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False},
        "model": {"type": "BPE", "vocab": added | ID_OF, "merges": []},
    }
    path.write_text(json.dumps(content))
    return TokenizerFile(path, VOCAB_SIZE, EOS)
