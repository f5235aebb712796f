"""Traformer: decoder-only transformers that stay accurate on sequences far longer than those they were trained on."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Looked up on first use, so that `import traformer` (and `tra --help`) does not load torch.
_LAZY = {
    "ThresholdRelativeAttention": "traformer.layers",
    "TraformerConfig": "traformer.models",
    "TraformerForCausalLM": "traformer.models",
    "convert": "traformer.models",
    "threshold_relative_attention": "traformer.ops",
}

__all__ = ["__version__", *_LAZY]

if TYPE_CHECKING:
    from traformer.layers import ThresholdRelativeAttention  # noqa: F401
    from traformer.models import TraformerConfig, TraformerForCausalLM  # noqa: F401
    from traformer.models.conversion.convert import convert  # noqa: F401
    from traformer.ops import threshold_relative_attention  # noqa: F401


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'traformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
