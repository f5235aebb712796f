"""What users import stays where it is."""

from __future__ import annotations

import inspect

import pytest

import traformer
import traformer.layers
import traformer.methods
import traformer.models
import traformer.ops

PUBLIC = {
    traformer: {
        "ThresholdRelativeAttention", "TraformerConfig", "TraformerForCausalLM", "__version__", "convert",
        "threshold_relative_attention",
    },
    traformer.ops: {
        "threshold_relative_attention", "attention_map", "attention_stats", "available_backends",
    },
    traformer.layers: {
        "AttentionLayer", "KeyValueCache", "RotaryAttention", "ThresholdRelativeAttention", "layer_class",
    },
    traformer.models: {
        "PRESETS", "TraformerCache", "TraformerConfig", "TraformerForCausalLM", "TraformerModel", "convert",
        "convert_authors_state_dict",
    },
}  # fmt: skip


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_names(module):
    assert PUBLIC[module] <= set(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None
    if module is traformer:
        assert set(module.__all__) == PUBLIC[module] and set(module.__all__) <= set(dir(module))


def test_the_arguments_of_the_layer():
    parameters = inspect.signature(traformer.ThresholdRelativeAttention).parameters
    assert list(parameters)[:3] == ["embed_dim", "num_heads", "num_kv_heads"]
    own = {
        "head_dim", "qk_norm", "dropout", "threshold", "exclude_self", "previous_heads", "temperature", "tolerance",
        "backend",
    }  # fmt: skip
    assert own == {name for name, x in parameters.items() if x.kind is inspect.Parameter.KEYWORD_ONLY}


def test_a_name_that_does_not_exist():
    with pytest.raises(AttributeError, match="no attribute 'Traformer'"):
        traformer.Traformer  # noqa: B018
