"""What only a GPU can show: compile, autocast, CUDA graphs, recompilation, training. `make test-gpu` runs this."""

import pytest
import torch

from tests.ops.cases import assert_all_close, make, oracle, run
from traformer.ops import available_backends, threshold_relative_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU on this machine")


def problem(**options):
    options = {"dtype": torch.float32, "width": 64} | options
    return [x.detach().cuda().requires_grad_() for x in make(**options)]


def test_auto_takes_it():
    assert "triton" in available_backends()
    inputs = problem(queries=200)
    assert torch.equal(threshold_relative_attention(*inputs), threshold_relative_attention(*inputs, backend="triton"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [16, 40, 64, 128, 256])
@pytest.mark.parametrize("length", [1, 63, 700])
def test_against_the_formula(dtype, width, length):
    inputs = problem(queries=length, width=width, dtype=dtype)
    got, expected = run(inputs, "triton", surrogate_width=0.5), oracle(inputs, surrogate_width=0.5)
    step = torch.finfo(dtype).eps
    assert_all_close(got[:1], expected[:1], rtol=max(2 * step, 2e-5), atol=max(2 * step, 2e-5))
    for a, b in zip(got[1:], expected[1:], strict=True):
        assert (a.double() - b).abs().max() <= max(8 * step, 5e-5) * b.abs().max()


def test_one_graph_under_compile():
    inputs = problem(queries=130)

    def function(*x):
        return threshold_relative_attention(*x).square().sum(-1)

    compiled = torch.compile(function, fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), function(*inputs), rtol=1e-4, atol=1e-4)
    torch.autograd.grad(compiled(*inputs).sum(), inputs)


def test_no_kernel_is_compiled_again_for_another_length():
    from traformer.ops.threshold_relative.triton import backward_kernels, forward_kernel

    run(problem(queries=100), "triton")
    kernels = (
        forward_kernel.forward_kernel,
        backward_kernels.query_gradient_kernel,
        backward_kernels.key_gradient_kernel,
    )
    before = [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]
    for length in (1, 16, 17, 255, 1000, 4096):
        run(problem(queries=length), "triton")
    assert [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels] == before


def test_cuda_graph():
    """Nothing on the way waits for the device: forward and backward can be captured, and replay on other values."""
    inputs = problem(queries=300)
    upstream = torch.randn_like(inputs[0])

    def step():
        return torch.autograd.grad(threshold_relative_attention(*inputs, dropout_p=0.0), inputs, upstream)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        inputs[2].mul_(-0.5)
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)


def test_autocast_and_training():
    from traformer import TraformerConfig, TraformerForCausalLM
    from traformer.tasks import FlipFlop

    task = FlipFlop(length=64, p_ignore=0.8)
    losses = {}
    for backend in ("triton", "blockwise"):
        torch.manual_seed(0)
        config = TraformerConfig.preset(
            "tiny", vocab_size=task.vocab_size, attention="tra_plus", attention_options={"backend": backend}
        )
        model = TraformerForCausalLM(config).cuda().eval()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses[backend] = []
        for number in range(10):
            ids = task.examples(seed=0, start=32 * number, count=32).input_ids.cuda()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[backend].append(loss.item())
    torch.testing.assert_close(losses["triton"], losses["blockwise"], rtol=0.02, atol=0.02)
