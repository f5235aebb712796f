"""Padding changes nothing, wherever it stands and whatever it holds; packed sequences are separate ones."""

from __future__ import annotations

import pytest
import torch
from transformers import DataCollatorWithFlattening

from tests.models.common import small_model, tokens
from traformer.errors import InputError

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
LENGTHS = [7, 1, 12]


def gradients(model):
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return grads


def assert_same_gradients(model, expected):
    for name, grad in gradients(model).items():
        scale = expected[name].abs().max().clamp(min=1e-6)
        torch.testing.assert_close(
            grad / scale, expected[name] / scale, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def separate(model, sequences):
    """Logits of each sequence alone, and the gradients of their summed squares."""
    logits = [model(x[None], use_cache=False).logits[0] for x in sequences]
    torch.cat(logits).pow(2).sum().backward()
    return [x.detach() for x in logits], gradients(model)


def sequences():
    return [tokens(1, length, seed=length)[0] for length in LENGTHS]


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("content", ["token", "nan", "inf"])
def test_padding_changes_nothing(attention, side, content):
    model = small_model(attention)
    parts = sequences()
    expected, expected_gradients = separate(model, parts)
    width = 16
    starts = {"left": [width - n for n in LENGTHS], "right": [0] * 3, "both": [2] * 3}[side]
    embed = model.get_input_embeddings()
    x = torch.zeros(3, width, dtype=torch.long)
    mask = torch.zeros(3, width, dtype=torch.long)
    for row, (start, part) in enumerate(zip(starts, parts, strict=True)):
        x[row, start : start + len(part)] = part
        mask[row, start : start + len(part)] = 1
    junk = {"token": 5.0, "nan": float("nan"), "inf": float("inf")}[content]
    inputs = embed(x).masked_fill(mask[..., None] == 0, junk)
    logits = model(inputs_embeds=inputs, attention_mask=mask, use_cache=False).logits
    real = [logits[row, start : start + len(part)] for row, (start, part) in enumerate(zip(starts, parts, strict=True))]
    torch.testing.assert_close(real, expected, **CLOSE)
    torch.cat(real).pow(2).sum().backward()
    assert_same_gradients(model, expected_gradients)


def test_holes_in_the_mask(attention):
    """Padding in the middle, as a second turn after ragged answers leaves it."""
    model, x = small_model(attention), tokens(1, 12)
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[:, 4:7] = 0
    kept = torch.cat([x[:, :4], x[:, 7:]], 1)
    torch.testing.assert_close(model(x, attention_mask=mask).logits[:, 7:], model(kept).logits[:, 4:], **CLOSE)


def test_a_row_without_real_tokens_is_finite(attention):
    model, x = small_model(attention), tokens(2, 6)
    mask = torch.tensor([[0] * 6, [1] * 6])
    output = model(x, attention_mask=mask, labels=x.masked_fill(mask == 0, -100), use_cache=False)
    output.loss.backward()
    assert output.logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    "way", ["cu_seqlens", "cu_seq_lens_q", "position_ids", "both", "with_mask", "positions_with_mask"]
)
def test_packed_equals_separate(attention, way):
    model = small_model(attention)
    parts = sequences()
    expected, expected_gradients = separate(model, parts)
    x = torch.cat(parts)[None]
    cu_seqlens = torch.tensor([0, 7, 8, 20], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    ones = torch.ones_like(x)
    kwargs = {
        "cu_seqlens": {"cu_seqlens": cu_seqlens},
        "cu_seq_lens_q": {
            "cu_seq_lens_q": cu_seqlens,
            "cu_seq_lens_k": cu_seqlens,
            "max_length_q": 12,
            "max_length_k": 12,
        },
        "position_ids": {"position_ids": positions},
        "both": {"position_ids": positions, "cu_seqlens": cu_seqlens},
        "with_mask": {"cu_seqlens": cu_seqlens, "attention_mask": ones},
        "positions_with_mask": {"position_ids": positions, "attention_mask": ones},
    }[way]
    output = model(x, **kwargs)
    assert output.past_key_values is None
    torch.testing.assert_close(list(output.logits[0].split(LENGTHS)), expected, **CLOSE)
    output.logits.pow(2).sum().backward()
    assert_same_gradients(model, expected_gradients)


@pytest.mark.parametrize("flash", [False, True])
def test_packed_by_transformers_collator(attention, flash):
    """The loss over a flattened batch is that of the separate sequences."""
    model = small_model(attention)
    parts = sequences()
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=flash)([{"input_ids": x.tolist()} for x in parts])
    loss = model(**batch).loss
    counts = [max(len(x) - 1, 0) for x in parts]
    losses = [model(x[None], labels=x[None]).loss * n for x, n in zip(parts, counts, strict=True) if n]
    torch.testing.assert_close(loss, sum(losses) / sum(counts), **CLOSE)


def test_packing_under_compile(compiled_attention):
    torch._dynamo.reset()
    model = small_model(compiled_attention, num_hidden_layers=1)
    parts = sequences()
    x = torch.cat(parts)[None]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    expected = model(x, position_ids=positions).logits
    torch.testing.assert_close(compiled(x, position_ids=positions, use_cache=False).logits, expected)
    with pytest.raises(RuntimeError, match="position_ids start over"):
        compiled(x.expand(2, -1), position_ids=positions, use_cache=False)


def test_packing_is_refused_where_it_cannot_be(attention):
    model, x = small_model(attention), tokens(2, 8)
    cu_seqlens = torch.tensor([0, 3, 8])
    with pytest.raises(InputError, match="the batch must be 1, not 2"):
        model(x, cu_seqlens=cu_seqlens)
    with pytest.raises(InputError, match="the batch must then be 1, not 2"):
        model(x, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]))
    with pytest.raises(InputError, match="rise from 0 to the number of tokens, 8"):
        model(x[:1], cu_seqlens=torch.tensor([0, 3, 7]))
    with pytest.raises(InputError, match="cannot use past_key_values"):
        model(x[:1], cu_seqlens=cu_seqlens, past_key_values=model.model.new_cache())
    with pytest.raises(InputError, match="cu_seq_lens_k differs"):
        model(x[:1], cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=torch.tensor([0, 4, 8]))
