"""A tiny flip-flop model trained on this backend: its losses are those of the other backends."""

import pytest
import torch

from traformer import TraformerConfig, TraformerForCausalLM
from traformer.ops import available_backends
from traformer.tasks import FlipFlop


def losses(backend, device, steps):
    torch.manual_seed(0)
    task = FlipFlop(length=32, p_ignore=0.8)
    config = TraformerConfig(
        attention="tra_plus", vocab_size=task.vocab_size, hidden_size=32, num_hidden_layers=1,
        num_attention_heads=2, attention_options={"backend": backend},
    )  # fmt: skip
    model = TraformerForCausalLM(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for number in range(steps):
        batch = task.examples(seed=0, start=4 * number, count=4)
        ids = batch.input_ids.to(device)
        loss = model(input_ids=ids, labels=torch.where(batch.answers.to(device), ids, -100)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("steps", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_losses_agree_with_the_other_backends(device, steps):
    other = "cpu" if device.type == "cpu" and "cpu" in available_backends() else "blockwise"
    torch.testing.assert_close(losses("triton", device, steps), losses(other, device, steps), rtol=1e-4, atol=1e-4)
