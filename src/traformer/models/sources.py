"""Where a model to convert comes from: a hub name, a folder, or a GGUF file."""

from __future__ import annotations

import importlib.util
import struct
import sys
from pathlib import Path
from typing import Any

from traformer.errors import InputError, first_line
from traformer.types import JsonObject


def load_source(name: str) -> tuple[Any, Any]:
    """The causal language model, float32 on the CPU, and its tokenizer (None where the source has none).

    name    a folder as save_pretrained writes it, a file that ends in .gguf, or a model's name on the hub
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    place, options = _place(name)
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(place, dtype="float32", **options)
    except (
        OSError, ValueError, KeyError, IndexError, RuntimeError, EOFError, SafetensorError, struct.error,
    ) as error:  # fmt: skip
        raise InputError(f"{name} cannot be loaded as a causal language model: {first_line(error)}") from error
    return model, _tokenizer(place, options)


def _place(name: str) -> tuple[str, JsonObject]:
    """What from_pretrained takes for the name."""
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise InputError(f"there is no GGUF file {name}")
        if importlib.util.find_spec("gguf") is None:
            raise InputError(f"{name} is a GGUF file, which needs the package gguf: pip install --no-deps gguf")
        return str(path.resolve().parent), {"gguf_file": path.name}
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"{name} is not a model's folder: it has no config.json")
        return str(path), {}
    if path.exists() or name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise InputError(f"{name} is neither a model's folder nor a GGUF file")
    return name, {}


def _tokenizer(place: str, options: JsonObject) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(place, **options)
    except (OSError, ValueError, KeyError, TypeError, ImportError):
        return None
