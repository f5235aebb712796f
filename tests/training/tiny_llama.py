"""A Llama with random weights and a small tokenizer, in a folder as save_pretrained writes it."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|endoftext|>"
SPARE = 4  # entries of the model that its tokenizer does not use, as real models have them
TEXT = "".join(f"line {n} of {n * 7919 % 1009} says hello to {n % 7} of you\n" for n in range(3000))


def tiny_llama(folder: Path, layers: int = 4) -> Path:
    """Bytes as tokens, and the end mark; tied embeddings and grouped heads, as small real models have them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {END: 0, **{letter: n + 1 for n, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary) + SPARE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def text_folder(folder: Path) -> Path:
    """A corpus of a training and a validation text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.txt").write_text(TEXT)
    (folder / "validation.txt").write_text(TEXT[: len(TEXT) // 4])
    return folder
