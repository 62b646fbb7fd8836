"""HTML and reStructuredText -> blocks of plain text: prose, headings and code, no navigation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from textwrap import dedent
from typing import NamedTuple


class Block(NamedTuple):
    """A paragraph, heading, list item, table row or listing."""

    text: str
    is_heading: bool = False


def _one_line(text: str) -> str:
    return " ".join(text.split())


# --- HTML ---------------------------------------------------------------------------------------

_SKIPPED_TAGS = {"script", "style", "svg", "head", "button", "form", "nav"}
_SKIPPED_CLASSES = {"navheader", "navfooter", "toc", "nosearch", "titlepage", "footer"}
_HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
_BLOCKS = _HEADINGS | {
    *("p", "div", "li", "ul", "ol", "dl", "dt", "dd", "table", "tr", "blockquote", "pre", "br"),
    *("center", "hr", "body"),
}
_VOID = {"br", "hr", "img", "input", "link", "meta", "col", "wbr", "area", "base"}
_LABEL = re.compile(r"^[\w-]+:$")  # of a diagram
_NUMBERING = re.compile(r"^(?:[A-Z]\.|\d+\.)(?:\d+\.)*\s+")


def html_blocks(source: str) -> list[Block]:
    """Text of a page, without what is for finding one's way."""
    reader = _HtmlReader()
    reader.feed(source)
    reader.close()
    reader.flush()
    return reader.blocks


class _HtmlReader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[Block] = []
        self._text: list[str] = []
        self._prefix = ""
        self._heading = False
        self._in_pre = 0
        self._skipped: str | None = None  # tag of the element that is left out
        self._skipped_depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skipped is not None:
            self._skipped_depth += tag == self._skipped
            return
        classes = (dict(attrs).get("class") or "").split()
        if tag not in _VOID and (tag in _SKIPPED_TAGS or not _SKIPPED_CLASSES.isdisjoint(classes)):
            self._skipped, self._skipped_depth = tag, 1
            return
        if tag == "br" and self._in_pre:
            self._text.append("\n")
        elif tag in _BLOCKS:
            self.flush()
            self._heading = tag in _HEADINGS
            self._in_pre += tag == "pre"
            self._prefix = "- " if tag == "li" else ""
        elif tag in ("td", "th") and "".join(self._text).strip():
            self._text.append(" | ")

    def handle_endtag(self, tag: str) -> None:
        if self._skipped is not None:
            self._skipped_depth -= tag == self._skipped
            if self._skipped_depth == 0:
                self._skipped = None
        elif tag in _BLOCKS:
            self.flush()
            self._heading = False
            self._in_pre = max(0, self._in_pre - (tag == "pre"))

    def handle_data(self, data: str) -> None:
        if self._skipped is None:
            self._text.append(data)

    def flush(self) -> None:
        """End the block that was being read."""
        text = "".join(self._text)
        self._text.clear()
        if not text.strip():
            return
        if self._in_pre:
            self.blocks.append(Block(_listing(text)))
            return
        text = _one_line(text).strip(" |")
        if self._heading:
            text = _NUMBERING.sub("", text)
        if text and not _LABEL.match(text):
            self.blocks.append(Block(self._prefix + text, self._heading))
        self._prefix = ""


def _listing(text: str) -> str:
    lines = [line.rstrip() for line in dedent(text.expandtabs(4)).splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


# --- reStructuredText ---------------------------------------------------------------------------

_LISTINGS = {
    *("code-block", "sourcecode", "testcode", "testoutput", "doctest", "parsed-literal"),
    "productionlist",
}
_WITHOUT_BODY = {
    *("index", "toctree", "image", "figure", "module", "moduleauthor", "sectionauthor"),
    *("highlight", "include", "literalinclude", "tabularcolumns", "audit-event", "availability"),
    *("testsetup", "testcleanup", "contents", "currentmodule", "program", "miscnews", "seealso"),
    *("limited-api-list", "versionadded", "versionchanged", "deprecated", "deprecated-removed"),
    *("only", "raw", "csv-table"),
}
_REMARKS = {
    "note": "Note: ",
    "warning": "Warning: ",
    "important": "Important: ",
    "caution": "Caution: ",
}
_DIRECTIVE = re.compile(r"^\s*\.\. ([\w:-]+)::\s*(.*)$")
_FOOTNOTE = re.compile(r"^\s*\.\. \[[^\]]+\] (.*)$")
_OPTION = re.compile(r"^\s*:[\w-]+:(\s.*)?$")
_RULE = re.compile(r"^\s*([=\-~^\"'*#+.:_`])\1{2,}\s*$")
_TABLE_RULE = re.compile(r"^\s*(\+[-=+]+\+|=+( +=+)+)\s*$")
_ITEM = re.compile(r"^(\s*)(?:[*-]|#\.|\d+\.) +")
# Who contributed a change, in brackets that may hold others.
_CREDIT = r"\((?:Contributed|Patch|Suggested|Written|Added)\b[^()]*(?:\([^()]*\)[^()]*)*\)"
# In this order: `role` texts, ``code``, `links`, **strong** and *emphasis*, [references]_,
# |substitutions|, escapes.
_INLINE = (
    (re.compile(_CREDIT), ""),
    (re.compile(r":pep:`(\d+)`"), r"PEP \1"),
    (re.compile(r":rfc:`(\d+)`"), r"RFC \1"),
    (re.compile(r":[\w:+-]+:`~?!?([^`<]+?)\s*<[^`>]*>`"), r"\1"),
    (re.compile(r":[\w:+-]+:`~[^`]*?([^`.]+)`"), r"\1"),
    (re.compile(r":[\w:+-]+:`!?([^`]*)`"), r"\1"),
    (re.compile(r"``(.*?)``"), r"\1"),
    (re.compile(r"`([^`<]+?)\s*<[^`>]+>`__?"), r"\1"),
    (re.compile(r"`([^`]+)`__?"), r"\1"),
    (re.compile(r"`([^`]+)`"), r"\1"),
    (re.compile(r"\*\*([^*]+)\*\*"), r"\1"),
    (re.compile(r"(?<![\w*])\*([^*\s][^*]*?)\*(?![\w*])"), r"\1"),
    (re.compile(r" ?\[#?\w*\]_"), ""),
    (re.compile(r"\|(\w+)\|"), r"\1"),
    (re.compile(r"\\ "), ""),
    (re.compile(r"\\([*`|])"), r"\1"),
    (re.compile(r" --- "), " - "),
)


def rst_blocks(source: str) -> list[Block]:
    """Text of a page of Sphinx documentation, without its cross-reference syntax."""
    return list(_RstReader(source.expandtabs(8).splitlines()).blocks())


def _plain(text: str) -> str:
    for pattern, by in _INLINE:
        text = pattern.sub(by, text)
    return _one_line(text)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


class _RstReader:
    """Lines read from top to bottom; each method takes those that it understands."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._at = 0

    def blocks(self) -> Iterator[Block]:
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if not line.strip() or _RULE.match(line) or _TABLE_RULE.match(line):
                self._at += 1
            elif match := _DIRECTIVE.match(line):
                yield from self._directive(match[1], match[2])
            elif match := _FOOTNOTE.match(line):
                self._lines[self._at] = match[1]
            elif line.lstrip().startswith(".. ") or line.strip() == "..":
                self._body()  # a label or a comment
            elif self._is_heading():
                yield Block(_plain(line), is_heading=True)
                self._at += 2
            elif line.lstrip().startswith(">>>"):
                yield Block(_listing("\n".join(self._paragraph())))
            else:
                yield from self._prose()

    def _is_heading(self) -> bool:
        following = self._lines[self._at + 1 : self._at + 2]
        return bool(following) and _RULE.match(following[0]) is not None

    def _directive(self, name: str, argument: str) -> Iterator[Block]:
        if name in _WITHOUT_BODY:
            self._body()
        elif name in _LISTINGS:
            listing = self._body()
            while listing and (not listing[0].strip() or _OPTION.match(listing[0])):
                del listing[0]
            if text := _listing("\n".join(listing)):
                yield Block(text)
        elif name in _REMARKS:
            lines = [argument, *dedent("\n".join(self._body())).splitlines()]
            for i, block in enumerate(_RstReader(lines).blocks()):
                yield block if i else Block(_REMARKS[name] + block.text)
        else:  # a description: its signatures, one a line, and then its text as any other
            self._at += 1
            signatures = [argument]
            for line in self._paragraph():
                if not _OPTION.match(line):
                    signatures.append(line.strip())
            for signature in signatures:
                if text := _plain(signature):
                    yield Block(text)

    def _paragraph(self) -> list[str]:
        """Lines up to the next blank one."""
        start = self._at
        while self._at < len(self._lines) and self._lines[self._at].strip():
            self._at += 1
        return self._lines[start : self._at]

    def _body(self) -> list[str]:
        """What is indented below the line at hand, which is passed, too."""
        indent = _indent(self._lines[self._at])
        self._at += 1
        return self._deeper(indent)

    def _deeper(self, indent: int) -> list[str]:
        start = self._at
        while self._at < len(self._lines) and (
            not self._lines[self._at].strip() or _indent(self._lines[self._at]) > indent
        ):
            self._at += 1
        return self._lines[start : self._at]

    def _prose(self) -> Iterator[Block]:
        indent = _indent(self._lines[self._at])
        lines: list[str] = []
        for line in self._paragraph():
            if _RULE.match(line) or _TABLE_RULE.match(line):
                continue
            if _ITEM.match(line) and lines:
                yield from self._text(lines)
                lines = []
            lines.append(line)
        yield from self._text(lines)
        if lines[-1].rstrip().endswith("::"):
            listing = _listing("\n".join(self._deeper(indent)))
            if listing:
                yield Block(listing)

    def _text(self, lines: list[str]) -> Iterator[Block]:
        prefix = ""
        if match := _ITEM.match(lines[0]):
            prefix = "- "
            lines = [lines[0][match.end() :], *lines[1:]]
        elif len(lines) > 1 and _indent(lines[1]) > _indent(lines[0]):
            lines = [lines[0] + ":", *lines[1:]]  # a term and its definition
        text = _plain(" ".join(lines)).strip(" |")
        text = re.sub(r"\s*::$", ":", text)
        if text and text != ":":
            yield Block(prefix + text)
