"""The authors' module, rebuilt here from its description in plain torch, and its weights in ours."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from traformer.errors import InputError
from traformer.models import TraformerConfig, TraformerForCausalLM, convert_authors_state_dict

WIDTH, HEADS, LAYERS, VOCABULARY = 32, 4, 3, 19


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        return self.weight * x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokeys = nn.Linear(WIDTH, WIDTH, bias=False)
        self.toqueries = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tovalues = nn.Linear(WIDTH, WIDTH, bias=False)
        self.delta_proj = nn.Linear(WIDTH, HEADS)
        self.c_out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def heads(self, x):
        return x.view(x.shape[0], x.shape[1], HEADS, -1).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.heads(self.toqueries(x)), self.heads(self.tokeys(x)), self.heads(self.tovalues(x))
        q = q / torch.sqrt(q.pow(2).mean(-1, keepdim=True) + 1e-6)
        k = k / torch.sqrt(k.pow(2).mean(-1, keepdim=True) + 1e-6)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        length = x.shape[1]
        keep = (scores > 0) & self.bias[:, :, :length, :length].bool()
        # kept keys from j to i, counted from the right
        distance = keep.flip(-1).cumsum(-1).flip(-1)
        gate = F.logsigmoid(self.delta_proj(x)).transpose(1, 2)[..., None]
        logits = (scores + gate * distance).masked_fill(~keep, -torch.inf)
        weights = torch.where(keep.any(-1, keepdim=True), logits.softmax(-1), 0.0)
        return self.c_out((weights @ v).transpose(1, 2).reshape(x.shape))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.linear2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        x1, x2 = self.linear1(x).split(2 * WIDTH, dim=-1)
        return self.linear2(x1 * F.silu(x2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.attn, self.ln2, self.mlp = Norm(), Attention(), Norm(), MLP()

    def forward(self, x):
        x = self.ln1(x)
        x = x + self.attn(x)
        x = self.ln2(x)
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.outln = Norm()
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.outln(x))


def ours() -> TraformerForCausalLM:
    config = TraformerConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS
    )
    return TraformerForCausalLM(config)


def test_same_logits_and_gradients():
    torch.manual_seed(0)
    theirs, model = Decoder().double(), ours().double()
    model.load_state_dict(convert_authors_state_dict(theirs.state_dict()), strict=True)
    tokens = torch.randint(0, VOCABULARY, (3, 41))
    torch.testing.assert_close(model(tokens).logits, theirs(tokens), rtol=1e-9, atol=1e-9)
    for logits in (theirs(tokens), model(tokens).logits):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    converted = convert_authors_state_dict({n: p.grad for n, p in theirs.named_parameters()})
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, converted[name], rtol=1e-6, atol=1e-9, msg=name)


def test_single_precision_agrees():
    torch.manual_seed(1)
    theirs, model = Decoder(), ours().eval()
    model.load_state_dict(convert_authors_state_dict(theirs.state_dict()))
    tokens = torch.randint(1, VOCABULARY, (2, 30))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, theirs(tokens), rtol=1e-4, atol=2e-5)


def test_a_foreign_state_dict_is_refused():
    state = Decoder().state_dict()
    with pytest.raises(InputError, match="lacks 'out"):
        convert_authors_state_dict({n: x for n, x in state.items() if n != "out.weight"})
    with pytest.raises(InputError, match="holds 'wte"):
        convert_authors_state_dict({**state, "wte.weight": torch.zeros(1)})
