"""Lines into pieces of text small enough to tokenise many at once, cut where no tokenizer would join.

A piece ends after a line end between two lines that are not blank, or where a document ends: GPT-2's and other
pre-tokenizers split there too, so tokens do not depend on where pieces are cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from traformer.data.sources import Line

PIECE = 1 << 14  # characters after which a piece ends at the next good place
LONGEST_PIECE = 1 << 18  # where it ends at any blank, and at twice that anywhere


class Piece(NamedTuple):
    text: str
    starts_document: bool
    done: int  # how much of the source has been read


def pieces(lines: Iterable[Line]) -> Iterator[Piece]:
    """The same text in pieces."""
    held: list[str] = []
    size, starts, done = 0, True, 0
    may_cut = False  # after what is held: its last line is whole and not blank
    for line in lines:
        blank = not line.text.strip()
        if held and (line.starts_document or (size >= PIECE and may_cut and not blank)):
            yield Piece("".join(held), starts, done)
            held, size, starts = [], 0, line.starts_document
        elif not held:
            starts = line.starts_document
        held.append(line.text)
        size, done = size + len(line.text), line.done
        may_cut = not blank and line.text.endswith("\n")
        if size >= LONGEST_PIECE:
            text = "".join(held)
            cut = _last_blank(text) or (len(text) if size >= 2 * LONGEST_PIECE else 0)
            if cut:
                yield Piece(text[:cut], starts, done)
                held, size, starts = [text[cut:]] if text[cut:] else [], len(text) - cut, False
    if held:
        yield Piece("".join(held), starts, done)


def _last_blank(text: str) -> int:
    """The place of the last blank between two words, where a word with its leading blank starts; 0 if there is none."""
    place = len(text)
    while (place := text.rfind(" ", 1, place)) > 0:
        if place + 1 < len(text) and not text[place - 1].isspace() and not text[place + 1].isspace():
            return place
    return 0
