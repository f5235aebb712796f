"""RoPE, ALiBi and FoT reach torch's fused attention, on whatever device: shown on tensors without data (meta)."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from traformer import TraformerConfig, TraformerForCausalLM


class Calls(TorchFunctionMode):
    """Names of the torch functions called, and the largest result of each."""

    def __init__(self):
        super().__init__()
        self.largest = {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            name = getattr(function, "__name__", str(function))
            self.largest[name] = max(self.largest.get(name, 0), result.numel())
        return result


@pytest.mark.parametrize("attention", ["rope", "alibi", "fot"])
def test_fused_attention_is_called_and_no_score_matrix_made(attention):
    length, heads = 640, 2
    config = TraformerConfig(
        attention=attention, vocab_size=50, hidden_size=64, num_hidden_layers=1, num_attention_heads=heads
    )
    with torch.device("meta"):
        model = TraformerForCausalLM(config).to(torch.bfloat16).eval()
        ids = torch.zeros(1, length, dtype=torch.long)
    with Calls() as calls, torch.no_grad():
        model(input_ids=ids)
    assert "scaled_dot_product_attention" in calls.largest, sorted(calls.largest)
    assert "softmax" not in calls.largest
    made_scores = {n for n, size in calls.largest.items() if size >= heads * length * length and "matmul" in n}
    assert not made_scores
