"""Layers as plain modules in anybody's model: every method and named configuration, without a model of ours."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from torch import nn

from traformer import ThresholdRelativeAttention
from traformer.errors import InputError
from traformer.layers import AttentionLayer, KeyValueCache, layer_class
from traformer.methods import METHODS, resolve_method
from traformer.models import TraformerConfig, TraformerForCausalLM

NAMES = list(METHODS)
BASIC = [name for name, method in METHODS.items() if not method.is_configuration]
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
WIDTH = 32


def build(name: str, **more) -> AttentionLayer:
    torch.manual_seed(0)
    options = {**resolve_method(name).options, **more}
    return layer_class(name)(WIDTH, 4, 2, **options).double().eval()


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_token_by_token_equals_one_forward(name):
    """One at a time, and in chunks, through a cache of the layer's own."""
    attn, x = build(name), draw(2, 11)
    full = attn(x)
    assert full.shape == x.shape and full.isfinite().all()
    for sizes in ([1] * 11, [4, 1, 6]):
        cache = KeyValueCache()
        pieces = [attn(piece, cache=cache) for piece in x.split(sizes, dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), full, **CLOSE)
        assert cache.get_seq_length() == 11


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_padding_on_either_side_changes_nothing(name):
    attn, x = build(name), draw(1, 7)
    alone = attn(x)
    for left in (0, 3):
        padded = torch.full((1, 10, WIDTH), torch.nan, dtype=torch.float64)
        padded[:, left : left + 7] = x
        mask = torch.zeros(1, 10, dtype=torch.bool)
        mask[:, left : left + 7] = True
        out = attn(padded, key_padding_mask=mask)
        torch.testing.assert_close(out[:, left : left + 7], alone, **CLOSE)
        cache = KeyValueCache()  # the mask names the keys of the cache, then the new ones
        pieces = [attn(padded[:, :6], key_padding_mask=mask[:, :6], cache=cache)]
        pieces += [attn(padded[:, t : t + 1], key_padding_mask=mask[:, : t + 1], cache=cache) for t in range(6, 10)]
        torch.testing.assert_close(torch.cat(pieces, 1)[:, left : left + 7], alone, **CLOSE)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_packed_equals_separate(name):
    attn, x = build(name), draw(1, 12)
    ends = [0, 5, 6, 12]
    packed = attn(x, cu_seqlens=torch.tensor(ends))
    separate = [attn(x[:, a:b]) for a, b in itertools.pairwise(ends)]
    torch.testing.assert_close(packed, torch.cat(separate, dim=1), **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_starts_as_in_a_model(name):
    """The same names; the same constants; random numbers of the same spread. Nothing is left uninitialised."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = TraformerForCausalLM(TraformerConfig(attention=name, vocab_size=9, **sizes))
    inside = dict(model.model.layers[0].self_attn.named_parameters())
    alone = layer_class(name)(64, 4, 2, **resolve_method(name).options)
    assert {n: p.shape for n, p in alone.named_parameters()} == {n: p.shape for n, p in inside.items()}

    def check():
        for parameter_name, parameter in alone.named_parameters():
            expected = inside[parameter_name]
            constant = expected.unique().numel() <= (2 if parameter_name.endswith("_proj.bias") else 1)
            if constant:
                assert torch.equal(parameter, expected), parameter_name
            else:
                ratio = parameter.std() / expected.std()
                assert 1 / 3 < ratio < 3 if expected.numel() < 100 else 0.8 < ratio < 1.25, parameter_name

    check()
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter.fill_(torch.nan)
    alone.reset_parameters()
    check()


@pytest.mark.parametrize("name", BASIC)
def test_options_and_their_defaults_are_those_of_the_catalogue(name):
    table, layer = METHODS[name].option_table, layer_class(name)
    explicit: dict[str, object] = {}
    for base in layer.__mro__:  # what a class does not name itself, its base does
        if "__init__" in vars(base) and issubclass(base, AttentionLayer):
            for option, parameter in inspect.signature(base.__init__).parameters.items():
                if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                    explicit.setdefault(option, parameter.default)
    for option, (default, _) in table.items():
        assert explicit[option] == default, option
    shared = {"head_dim", "qk_norm", "dropout", "layer_idx", "leader", "initialize", "embedding_range"}
    extra = set(explicit) - set(table) - shared
    assert not extra, f"{name} takes {extra}, which its entry in the catalogue lacks"
    with pytest.raises(InputError, match=f"'depth', unknown to attention '{name}'"):
        layer(WIDTH, 4, depth=3)


def test_names_in_a_state_dict():
    """Checkpoints of every version hold these."""
    attn = ThresholdRelativeAttention(WIDTH, 4, temperature=True)
    assert set(attn.state_dict()) == {
        "q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "o_proj.bias", "decay_proj.weight",
        "decay_proj.bias", "temperature",
    }  # fmt: skip


class Block(nn.Module):
    """Somebody's own block around the layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = ThresholdRelativeAttention(width, num_heads=4, dropout=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attn(self.norm(x))


def test_in_a_model_of_ones_own():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 32), Block(32), Block(32), nn.Linear(32, 11))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.randint(0, 11, (16, 20))
    losses = []
    for _ in range(60):  # say what stood one place before
        loss = nn.functional.cross_entropy(model(ids)[:, 1:].flatten(0, 1), ids[:, :-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    again = nn.Sequential(nn.Embedding(11, 32), Block(32), Block(32), nn.Linear(32, 11))
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(ids), model.eval()(ids))


def test_what_cannot_be_used_is_one_sentence():
    attn = ThresholdRelativeAttention(WIDTH, 4)
    for arguments, sentence in (
        ((25, 4), "embed_dim \\(25\\) must be a multiple of num_heads"),
        ((24, 4, 3), "num_heads a multiple of num_kv_heads"),
        ((24, 4, 0), "sizes must be positive"),
    ):
        with pytest.raises(InputError, match=sentence):
            ThresholdRelativeAttention(*arguments)
    with pytest.raises(InputError, match="dropout must be in"):
        ThresholdRelativeAttention(WIDTH, 4, dropout=1.0)
    with pytest.raises(InputError, match="the input must be floats \\[batch, length, 32\\]"):
        attn(torch.zeros(2, 3, 31))
    with pytest.raises(InputError, match="the input must be floats"):
        attn(torch.zeros(2, 3, WIDTH, dtype=torch.long))
    with pytest.raises(InputError, match="key_padding_mask must be \\[2, 5\\], one entry for every token cached"):
        cache = KeyValueCache()
        attn(torch.zeros(2, 2, WIDTH), cache=cache)
        attn(torch.zeros(2, 3, WIDTH), key_padding_mask=torch.ones(2, 3, dtype=torch.bool), cache=cache)
    with pytest.raises(InputError, match="another layer's cache"):
        layer_class("fot")(WIDTH, 4)(torch.zeros(2, 2, WIDTH), cache=cache)
    with pytest.raises(InputError, match="a batch of 2, but the new tokens are a batch of 1"):
        attn(torch.zeros(1, 2, WIDTH), cache=cache)


def test_a_cache_can_be_cropped_and_reordered():
    attn, x = build("tra_plus"), draw(2, 9)
    cache = KeyValueCache()
    with torch.no_grad():
        attn(x, cache=cache)
        cache.crop(-3)
        cache.reorder_cache(torch.tensor([1, 0]))
        again = attn(x[:, 6:].flip(0), cache=cache)
        torch.testing.assert_close(again.flip(0), attn(x)[:, 6:], **CLOSE)
