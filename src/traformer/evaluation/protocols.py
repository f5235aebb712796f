"""How a text was measured, in words. Loads without torch."""

from __future__ import annotations

from traformer.types import Options


def protocol_text(protocol: Options) -> str:
    """The protocol in one line; window and stride are in the table."""
    read, whole = protocol["tokens_read_of_text"], protocol["tokens_in_text"]
    return (
        f"protocol: {protocol['data']}, split {protocol['split']}, {read:,} of {whole:,} tokens; tokenizer "
        f"{protocol['tokenizer']} ({protocol['vocabulary']:,} entries); all tokens but the first scored once; BOS "
        f"{protocol['bos']}; documents: {protocol['documents']}; per word: {protocol['words_in_text']:,} words + "
        f"{protocol['line_ends_in_text']:,} line ends; per byte: {protocol['bytes_in_text']:,} bytes"
    )
