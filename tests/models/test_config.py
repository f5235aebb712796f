"""Configurations: presets, what is refused and in which words, the round trip through a file."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from traformer.errors import InputError
from traformer.models import PRESETS, TraformerConfig


@pytest.mark.parametrize(
    ("name", "layers", "heads", "width"),
    [("tiny", 2, 2, 128), ("mini", 4, 4, 256), ("small", 4, 8, 512), ("medium", 8, 8, 512)],
)
def test_presets(name, layers, heads, width):
    config = TraformerConfig.preset(name, vocab_size=11)
    assert (config.num_hidden_layers, config.num_attention_heads, config.hidden_size) == (layers, heads, width)
    assert config.attention_dropout == config.hidden_dropout == 0.01
    assert config.intermediate_size == 2 * width and config.num_key_value_heads == heads and config.vocab_size == 11


def test_preset_overrides():
    assert TraformerConfig.preset("tiny", hidden_dropout=0.0, num_hidden_layers=3).num_hidden_layers == 3
    assert set(PRESETS) == {"tiny", "mini", "small", "medium"}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"attention": "ropee"}, "unknown attention 'ropee'; did you mean 'rope'"),
        ({"residual": "post"}, "unknown residual 'post'"),
        ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size .30. must be a multiple"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"vocab_size": 0}, "vocab_size must be a positive"),
        ({"hidden_dropout": 1.0}, "hidden_dropout must be in"),
        ({"pad_token_id": 300}, "pad_token_id .300."),
        ({"tie_word_embeddings": True}, "untied"),
        ({"hiden_size": 64}, "did you mean 'hidden_size'"),
        ({"format_version": 99}, "upgrade traformer"),
        ({"attention_options": {"treshold": 1.0}}, "'treshold'.*its options: threshold"),
        ({"attention_options": {"threshold": -1.0}}, "threshold must be a finite number >= 0"),
        ({"attention_options": {"tolerance": 1.0}}, "tolerance must be"),
        ({"attention_options": {"temperature": 2}}, "temperature must be true or false"),
        ({"attention_options": {"exclude_self": [True]}}, "exclude_self has 1 entries, but the layer has 4 heads"),
        ({"attention_options": {"exclude_self": "all"}}, "exclude_self must be"),
        ({"attention_options": {"backend": "blockwize"}}, "did you mean 'blockwise'"),
        ({"attention": "rope", "attention_options": {"theta": 0}}, "theta must be positive"),
        ({"attention": "rope", "head_dim": 7}, "even head_dim"),
    ],
)
def test_refused(fields, sentence):
    with pytest.raises(InputError, match=sentence) as error:
        TraformerConfig(**fields)
    assert "\n" not in str(error.value)


def test_keywords_of_transformers_pass():
    config = TraformerConfig(
        name_or_path="x", output_attentions=True, num_labels=3, torch_dtype="bfloat16", max_length=9
    )
    assert config.output_attentions and config.num_labels == 3


def test_round_trip(tmp_path):
    config = TraformerConfig(attention="tra", attention_options={"exclude_self": "half"}, num_key_value_heads=2)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, TraformerConfig)
    assert loaded.to_diff_dict() == config.to_diff_dict()


def test_options_are_not_shared_between_configurations():
    first, second = TraformerConfig(), TraformerConfig()
    first.attention_options["threshold"] = 1.0
    assert second.attention_options == {}
