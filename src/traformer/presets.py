"""Sizes by name. Apart from the models, so that commands can name them without loading those."""

from __future__ import annotations

from traformer.types import JsonObject

# Sizes after Turc et al. 2019: layers, heads, width.
_SIZES = {"tiny": (2, 2, 128), "mini": (4, 4, 256), "small": (4, 8, 512), "medium": (8, 8, 512)}
PRESETS: dict[str, JsonObject] = {
    name: {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "hidden_size": width,
        "attention_dropout": 0.01,
        "hidden_dropout": 0.01,
    }
    for name, (layers, heads, width) in _SIZES.items()
}
