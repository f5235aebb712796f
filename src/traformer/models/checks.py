"""What is looked at before tokens are generated, so that a mistake is a sentence and not a traceback from inside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from transformers.utils import logging

from traformer.errors import InputError
from traformer.models.config import TraformerConfig

logger = logging.get_logger(__name__)


def check_prompt(prompt: object, attention_mask: Tensor | None, vocab_size: int) -> None:
    """Raise InputError for a prompt that is empty, ragged or holds ids outside the vocabulary.

    Padding on the right is a warning, as in transformers: generation continues after the padding.
    """
    if isinstance(prompt, (list, tuple)):
        lengths = {len(row) for row in prompt if isinstance(row, (list, tuple))}
        if len(lengths) > 1:
            raise InputError(
                "input_ids holds sequences of different lengths and no mask; pad them on the left to one tensor and "
                "pass attention_mask with 0 at the padding"
            )
        raise InputError("input_ids must be a tensor [batch, length]; wrap the list in torch.tensor")
    if not isinstance(prompt, Tensor) or prompt.dim() != 2 or prompt.shape[1] == 0:
        raise InputError("the prompt is empty; give input_ids [batch, length] with at least one token")
    check_ids(prompt, vocab_size)
    if attention_mask is None:
        return
    if not bool(attention_mask.any(-1).all()):
        raise InputError("attention_mask has a row without a real token; leave that row out")
    if len(attention_mask) == 1 and not bool(attention_mask[0, -1]):  # transformers itself warns for larger batches
        logger.warning("the prompt is padded on the right and generation continues after the padding; pad on the left")


def check_ids(input_ids: Tensor, vocab_size: int) -> None:
    """Raise InputError for an id that is not in the vocabulary."""
    if input_ids.numel() == 0:
        raise InputError(f"input_ids is empty: {list(input_ids.shape)}; give at least one token")
    low, high = (int(x) for x in input_ids.aminmax())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise InputError(f"input_ids holds the id {bad}, but the vocabulary has ids 0 to {vocab_size - 1}")


def cache_bytes(config: TraformerConfig, rows: int, length: int, dtype: torch.dtype) -> int:
    """Memory of keys and values of `length` tokens in every layer."""
    assert config.num_key_value_heads is not None and config.head_dim is not None
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    return rows * length * per_token


def check_memory(config: TraformerConfig, rows: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise InputError where the cache of a context of this length cannot fit into what memory is free."""
    if device.type == "cpu":
        import psutil

        free = psutil.virtual_memory().available
    elif device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        return
    needed = cache_bytes(config, rows, length, dtype)
    if needed > free:
        raise InputError(
            f"a context of {length} tokens for {rows} sequence(s) needs {needed / 2**30:.1f} GiB of cache, but "
            f"{free / 2**30:.1f} GiB are free; use a shorter context or fewer sequences"
        )


def check_loaded(info: Mapping[str, Iterable[str]], path: object, attention: object) -> None:
    """Raise InputError where a checkpoint's weights are not those of the model they were loaded into.

    The head may be missing (a base model's checkpoint; transformers warns that it is new) or be left out (a base model
    from a language model's checkpoint).
    """
    missing, unexpected = (
        sorted(name for name in info[kind] if not name.startswith("lm_head."))
        for kind in ("missing_keys", "unexpected_keys")
    )
    if not missing and not unexpected:
        return
    what = f"lacks {missing[0]!r}" if missing else f"holds {unexpected[0]!r}, which the model lacks"
    raise InputError(
        f"the checkpoint {str(path)!r} {what}: it was not saved by a model with attention {attention!r} and this "
        "configuration; load it with the configuration it was saved with, or pass strict=False"
    )
