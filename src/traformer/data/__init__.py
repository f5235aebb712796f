"""Text for language modelling: where it comes from, tokenizers, and the memory-mapped cache of its tokens.

A datum's walk: files or hub dataset (`sources`) -> pieces of text (`pieces`) -> ids (`tokenizers`) -> cache (`cache`)
-> `TokenizedText`, which the text task and the evaluation read. Importing this package does not load torch.
"""

from __future__ import annotations

from traformer.data.cache import TokenizedText, cache_folder
from traformer.data.corpus import Corpus
from traformer.data.tokenizers import TextTokenizer, bpe_size, load_tokenizer

__all__ = ["Corpus", "TextTokenizer", "TokenizedText", "bpe_size", "cache_folder", "load_tokenizer"]
