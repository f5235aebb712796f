"""`observe` against what the model returns by itself."""

from __future__ import annotations

import pytest
import torch

from traformer.models import TraformerConfig, TraformerForCausalLM
from traformer.models.observe import observe
from traformer.ops import attention_map


def small(attention: str) -> TraformerForCausalLM:
    torch.manual_seed(0)
    config = TraformerConfig(
        attention=attention, vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return TraformerForCausalLM(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("attention", ["tra", "tra_plus", "rope", "cope", "fot", "selective"])
def test_the_trace_is_what_the_model_did(attention):
    model = small(attention)
    ids = torch.arange(1, 15).view(2, 7)
    wanted = model(ids, output_attentions=True, use_cache=False)
    with observe(model, weights=True) as trace:
        seen = model(ids, use_cache=False)
    assert seen.attentions is None and torch.equal(seen.logits, model(ids, use_cache=False).logits)
    assert [one.layer.layer_idx for one in trace] == [0, 1]
    for one, weights in zip(trace, wanted.attentions, strict=True):
        torch.testing.assert_close(one.weights, weights)
        q, k, _ = one.layer.project(one.hidden_states)
        k = k.repeat_interleave(2, dim=1)
        torch.testing.assert_close(one.content_scores(), q @ k.transpose(-1, -2) * one.layer.scale)
        assert torch.equal(one.content_scores(torch.tensor([2, 5])), one.content_scores()[:, :, [2, 5]])
    assert all("attend" not in vars(one.layer) for one in trace)
    if attention.startswith("tra"):
        stats, decay = trace[0].reads(), trace[0].log_decay()
        assert stats.kept.shape == decay.shape == (2, 4, 7)
        assert torch.equal(stats.kept > 0, trace[0].weights.sum(-1) > 0)


@torch.no_grad()
def test_a_visitor_keeps_nothing_and_an_error_leaves_the_model_as_it_was():
    model = small("tra")
    seen = []
    with observe(model, visit=lambda one: seen.append(one.weights)) as trace:
        model(torch.arange(1, 8)[None], use_cache=False)
    assert seen == [None, None] and trace == []
    with pytest.raises(ZeroDivisionError), observe(model):
        raise ZeroDivisionError
    assert all("attend" not in vars(module) for module in model.modules())


@torch.no_grad()
@pytest.mark.parametrize(
    ("attention", "options"),
    [("tra_previous", {}), ("tra_variant", {"previous_heads": "half", "distance": "forgetting"})],
)
def test_a_head_that_reads_the_previous_token_keeps_that_key_alone(attention, options):
    torch.manual_seed(0)
    config = TraformerConfig(
        attention=attention, attention_options=options, vocab_size=20, hidden_size=32, num_hidden_layers=1,
        num_attention_heads=4,
    )  # fmt: skip
    model = TraformerForCausalLM(config).eval()
    with observe(model, weights=True) as trace:
        model(torch.arange(1, 10)[None], use_cache=False)
    (seen,) = trace
    before = torch.ones(8).diag(-1).bool()  # [9, 9]
    assert torch.equal(seen.keep()[0, :2], before.expand(2, 9, 9))
    assert torch.equal(seen.weights[0, :2], before.expand(2, 9, 9).to(seen.weights.dtype))
    assert seen.keep()[0, 2:].sum() > 2 * 9  # the other heads choose by their scores
    if attention == "tra_previous":
        stats = seen.reads()
        assert torch.equal(stats.kept[0], seen.keep()[0].sum(-1))
        assert (seen.log_decay()[0, :2].exp() == 0).all()
        q, k, _, log_decay = seen.operands()
        excluded = torch.tensor(seen.layer.excluded_heads)
        again = attention_map(q, k, log_decay, scale=seen.layer.scale, exclude_self=excluded)
        torch.testing.assert_close(again.weights, seen.weights)
