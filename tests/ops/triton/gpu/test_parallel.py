"""DDP and FSDP2 around a model of tra_plus: the same loss and gradients as without them. One process; gloo or NCCL."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from traformer import TraformerConfig, TraformerForCausalLM

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU on this machine")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request):
    """With a process group of one on it."""
    if not dist.is_available():
        pytest.skip("this build of torch has no distributed training")
    backend = "nccl" if request.param == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")
    dist.destroy_process_group()


def build(device):
    torch.manual_seed(0)
    config = TraformerConfig(
        attention="tra_plus", vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    return TraformerForCausalLM(config).to(device)


def loss_and_gradients(wrapped, parameters, device):
    ids = torch.randint(0, 20, (2, 48), generator=torch.Generator().manual_seed(1)).to(device)
    loss = wrapped(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {}
    for name, parameter in parameters:
        grad = parameter.grad
        gradients[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return loss.detach(), gradients


def check(wrapped, parameters, device):
    plain = build(device)
    loss, gradients = loss_and_gradients(wrapped, parameters, device)
    expected_loss, expected = loss_and_gradients(plain, plain.named_parameters(), device)
    torch.testing.assert_close(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_ddp(device):
    model = build(device)
    wrapped = DistributedDataParallel(model, device_ids=[0] if device.type == "cuda" else None)
    check(wrapped, list(model.named_parameters()), device)


def test_fsdp2(device):
    model = build(device)
    mesh = dist.init_device_mesh(device.type, (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    check(model, list(model.named_parameters()), device)
