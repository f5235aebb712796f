"""Docstrings as Markdown: aligned lists of arguments become lists, formulas stay as they are, the rest flows.

Used for the page of methods, and by mkdocstrings for the API (as an extension of griffe, named in mkdocs.yml).
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

# "name      what it is", where at least two blanks set the name apart.
_ENTRY = re.compile(r"^( *)([\w*][\w*.,=\[\] -]*?) {2,}(\S.*)$")
_SPECIAL = re.compile(r"([\\*_{}\[\]|#])")


def readable(docstring: str) -> str:
    """A docstring as Markdown."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(docstring))
    return "\n\n".join(filter(None, map(_paragraph, paragraphs)))


def _paragraph(text: str) -> str:
    """Lines of one kind after another: flowing text, entries with a name, and what is indented."""
    parts: list[tuple[str, list[str]]] = []
    entry_at = 0  # the indent of the last entry's name
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        found = _ENTRY.match(line)
        kind = parts[-1][0] if parts else "text"
        if found:
            entry_at = len(found[1])
            _add(parts, "entries", f"- `{found[2]}`: {_escaped(found[3])}")
        elif kind == "entries" and indent > entry_at:
            parts[-1][1][-1] += f" {_escaped(line.strip())}"
        elif indent >= 4:
            _add(parts, "code", line)
        else:
            _add(parts, "text", _escaped(line.strip()))
    return "\n\n".join(_written(kind, lines) for kind, lines in parts)


def _add(parts: list[tuple[str, list[str]]], kind: str, line: str) -> None:
    if not parts or parts[-1][0] != kind:
        parts.append((kind, []))
    parts[-1][1].append(line)


def _written(kind: str, lines: list[str]) -> str:
    if kind == "entries":
        return "\n".join(lines)
    if kind == "code":
        return "```text\n" + inspect.cleandoc("\n".join(lines)) + "\n```"
    return re.sub(r"(?:^| )(Source|Path|Options?|Choices?):", r"\n\n**\1:**", " ".join(lines)).strip()


def _escaped(text: str) -> str:
    """Text whose signs Markdown shows as they are; what is between backquotes stays code."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:  # a backquote without its partner: code that goes on in the next line
        return text
    pieces[::2] = [_SPECIAL.sub(r"\\\1", piece).replace("<", "&lt;") for piece in pieces[::2]]
    return "`".join(pieces)


class ReadableDocstrings(griffe.Extension):
    """Rewrites every docstring before mkdocstrings shows it."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = readable(obj.docstring.value)
