"""Token ids that mean the same in every task which uses them, and names for a task's own symbols."""

from __future__ import annotations

PAD, BOS, SEP, EOS = range(4)
SPECIAL_TOKENS = ("<pad>", "<bos>", "<sep>", "<eos>")
FIRST_SYMBOL = len(SPECIAL_TOKENS)  # a task's own symbols come after these

NO_SOURCE = -1  # in place of the position of the key that decides an answer, where there is none

_BASE64 = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+/"


def symbol_names(count: int) -> tuple[str, ...]:
    """Letters and digits for up to 64 symbols, numbers for more."""
    return tuple(_BASE64[:count]) if count <= len(_BASE64) else tuple(str(number) for number in range(count))
