"""What only the compiled backend has: instruction sets, threads, decode, the key index, strides, determinism."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.ops.cases import assert_all_close, make, oracle, run
from traformer.errors import InputError
from traformer.ops import KeyIndex, attention_map, attention_stats, threshold_relative_attention
from traformer.ops.threshold_relative import cpu
from traformer.processor import LIBRARY_VARIABLE

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason=str(cpu.unavailable_reason()))


def test_every_instruction_set_agrees(monkeypatch):
    inputs = make(width=32, queries=129, dtype=torch.float32, decay="long")
    expected = oracle(inputs)
    ran = 0
    for name, usable in cpu.instruction_sets().items():
        monkeypatch.setenv(cpu.ISA_VARIABLE, name)
        if usable:
            for x, y in zip(run(inputs, "cpu"), expected, strict=True):
                torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)
            ran += 1
        else:
            with pytest.raises(InputError, match=f"{name}.*this CPU lacks"):
                threshold_relative_attention(*inputs, backend="cpu")
    assert ran >= 2 or list(cpu.instruction_sets()) == ["plain"]
    monkeypatch.setenv(cpu.ISA_VARIABLE, "mmx")
    with pytest.raises(InputError, match="mmx"):
        threshold_relative_attention(*inputs, backend="cpu")


@pytest.mark.parametrize(("length", "gate", "key_heads"), [(2307, 6.0, 2), (4355, 0.0, 1)])
def test_the_largest_row_blocks(length, gate, key_heads):
    """Forward blocks of 256 rows from 2,048 queries on, backward ones from 4,096; rows leave and close ranks within."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, heads, length, 16, generator=generator) for heads in (2, key_heads, key_heads, 2))
    inputs = [F.rms_norm(q, (16,)), F.rms_norm(k, (16,)), v, F.logsigmoid(g[..., 0] + gate)]
    grad = torch.randn(1, 2, length, 16, generator=generator)
    results = []
    for backend, dtype in (("cpu", torch.float32), ("blockwise", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = threshold_relative_attention(*leaves, exclude_self=torch.tensor([True, False]), backend=backend)
        results.append([out, *torch.autograd.grad((out * grad.to(dtype)).sum(), leaves)])
    *found, found_decay = results[0]
    *expected, expected_decay = results[1]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=2e-5)
    # Terms weighted by the distance: the formula itself, in fp32, is off by 1e-4 here.
    torch.testing.assert_close(found_decay.double(), expected_decay, rtol=1e-4, atol=2e-7 * length)


def test_auto_takes_it_where_it_can():
    q, k, v, g = (x.detach() for x in make(width=16, dtype=torch.float32))
    assert torch.equal(
        threshold_relative_attention(q, k, v, g), threshold_relative_attention(q, k, v, g, backend="cpu")
    )
    wide = make(batch=1, queries=3, width=264, dtype=torch.float32)
    assert torch.equal(threshold_relative_attention(*wide), threshold_relative_attention(*wide, backend="blockwise"))
    with pytest.raises(InputError, match="up to 256, not 264; use backend='blockwise'"):
        threshold_relative_attention(*wide, backend="cpu")
    with pytest.raises(InputError, match="not float64; use backend='blockwise'"):
        threshold_relative_attention(*make(width=16), backend="cpu")


@pytest.mark.parametrize("width", [1, 5, 12, 63])
def test_head_sizes_of_every_kind(width):
    """Channels of zeros fill up to a multiple of 8; results, gradients and layout are those of the problem as given."""
    inputs = make(queries=70, width=width, dtype=torch.float32)
    options = {"scale": 0.4, "surrogate_width": 0.3, "dropout_p": 0.1, "dropout_seed": 3}
    found = run(inputs, "cpu", **options)
    assert_all_close(found, oracle(inputs, **options), rtol=1e-4, atol=2e-5)
    assert found[0].transpose(1, 2).is_contiguous() and found[0].shape[-1] == width
    index = KeyIndex()
    index.append(inputs[1].detach())
    one = [x.detach()[:, :, -1:] for x in (inputs[0], inputs[3])]
    plain, indexed = (
        threshold_relative_attention(one[0], *(x.detach() for x in inputs[1:3]), one[1], backend="cpu", key_index=i)
        for i in (None, index)
    )
    torch.testing.assert_close(plain, indexed)


def test_as_many_keys_as_it_counts():
    """2^24 keys of head size 1, every one of them read."""
    k = torch.ones(1, 1, 2**24, 1)
    k[..., ::2, :] = -1
    q, v, g = torch.ones(1, 1, 1, 1), k * 3, torch.zeros(1, 1, 1)
    assert threshold_relative_attention(q, k, v, g, tolerance=0.0).item() == pytest.approx(3.0)
    with pytest.raises(InputError, match="up to 2\\^24 keys, not 16777217"):
        threshold_relative_attention(q, *[torch.ones(1, 1, 2**24 + 1, 1)] * 2, g, backend="cpu")


def test_a_wish_that_cannot_be_met_is_an_error_also_for_auto(monkeypatch, tmp_path):
    inputs = make(queries=3, width=8, dtype=torch.float32)
    monkeypatch.setenv(cpu.ISA_VARIABLE, "bogus")
    with pytest.raises(InputError, match=r"TRAFORMER_CPU_ISA=bogus is not in this build; give one of .*plain"):
        threshold_relative_attention(*inputs)
    monkeypatch.delenv(cpu.ISA_VARIABLE)
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    for path, says in ((tmp_path / "none.so", "is not a file"), (broken, "cannot be loaded")):
        monkeypatch.setenv(LIBRARY_VARIABLE, str(path))
        _forget_the_library()
        try:
            for backend in ("auto", "cpu"):
                with pytest.raises(InputError, match=f"TRAFORMER_CPU_LIBRARY=.*{path.name} {says}") as raised:
                    threshold_relative_attention(*inputs, backend=backend)
                assert "compiler" not in str(raised.value)
        finally:
            monkeypatch.delenv(LIBRARY_VARIABLE)
            _forget_the_library()


def test_a_kernel_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(cpu, "_INTERFACE", -1)
    _forget_the_library()
    try:
        with pytest.raises(InputError, match=r"was compiled from another version of the package; install .* again"):
            threshold_relative_attention(*make(queries=3, width=8, dtype=torch.float32), backend="cpu")
    finally:
        monkeypatch.undo()
        _forget_the_library()


def test_a_missing_kernel_is_mentioned_once(monkeypatch, caplog, tmp_path):
    inputs = make(queries=3, width=8, dtype=torch.float32)
    monkeypatch.delenv(cpu.ISA_VARIABLE, raising=False)
    monkeypatch.setattr(cpu, "library_path", lambda: tmp_path / "none.so")
    _forget_the_library()
    try:
        for _ in range(2):
            threshold_relative_attention(*inputs)
        threshold_relative_attention(*inputs, backend="blockwise")
        assert [record.message for record in caplog.records] == [cpu.missing_kernel_notice()]
        assert "not compiled" in caplog.text and "slower backend 'blockwise'" in caplog.text
    finally:
        monkeypatch.undo()
        _forget_the_library()
    assert cpu.missing_kernel_notice() is None


def _forget_the_library():
    for function in (cpu._load, cpu._choose, cpu._function, cpu.note_missing_kernel):
        function.cache_clear()


def test_too_many_threads_do_not_end_the_process(monkeypatch):
    """torch's number is cut to what the kernel takes, and the kernel itself refuses more."""
    inputs = [x.detach() for x in make(queries=300, width=8, dtype=torch.float32)]
    expected = threshold_relative_attention(*inputs, backend="cpu")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1_000_000)
    monkeypatch.setattr(cpu, "MOST_THREADS", 4)
    assert torch.equal(threshold_relative_attention(*inputs, backend="cpu"), expected)
    monkeypatch.setattr(cpu, "MOST_THREADS", 2_000_000)
    with pytest.raises(RuntimeError, match="malformed"):
        threshold_relative_attention(*inputs, backend="cpu")


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2)])
def test_threads_give_the_same_forward_and_repeatable_gradients(threads, heads):
    inputs = make(batch=1, heads=heads[0], key_heads=heads[1], queries=300, width=16, dtype=torch.float32, decay="long")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = run(inputs, "cpu")
        torch.set_num_threads(threads)
        first, second = run(inputs, "cpu"), run(inputs, "cpu")
    finally:
        torch.set_num_threads(before)
    assert torch.equal(first[0], single[0])
    for x, y, z in zip(first, second, single, strict=True):
        assert torch.equal(x, y)
        torch.testing.assert_close(x, z, rtol=1e-4, atol=1e-5)


def test_shares_torchs_thread_pool():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        (torch.randn(512, 512) @ torch.randn(512, 512)).exp()  # wakes torch's own pool
        inputs = [x.detach() for x in make(queries=600, width=16, dtype=torch.float32)]
        torch.nn.functional.scaled_dot_product_attention(*[torch.randn(2, 4, 512, 16)] * 3, is_causal=True)
        count = len(os.listdir("/proc/self/task"))
        threshold_relative_attention(*inputs, backend="cpu")
        assert len(os.listdir("/proc/self/task")) <= count
    finally:
        torch.set_num_threads(before)


def test_strides_of_every_kind():
    base = [x.detach() for x in make(queries=70, width=16, dtype=torch.float32)]
    expected = threshold_relative_attention(*base, backend="cpu")
    wide = [torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0] for x in base[:3]]  # channels not side by side
    gaps = [torch.cat([x, torch.full_like(x, torch.nan)], -1)[..., :16] for x in base[:3]]  # rows with a gap between
    for variant in (wide, gaps, [x.contiguous() for x in base[:3]]):
        assert torch.equal(threshold_relative_attention(*variant, base[3], backend="cpu"), expected)


@pytest.mark.parametrize("decay", ["init", "long", "zero"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 700])
def test_decode_equals_prefill(length, decay):
    q, k, v, g = (x.detach() for x in make(queries=length, width=32, dtype=torch.float32, decay=decay, seed=3))
    whole = threshold_relative_attention(q, k, v, g, backend="cpu", tolerance=0.0)
    read = attention_stats(q, k, g, backend="cpu", tolerance=0.0)
    index = KeyIndex()
    index.append(k[:, :, : length // 2])
    for key in range(length // 2, length):
        index.append(k[:, :, key : key + 1])
    for t in {0, length // 2, length - 1}:
        for key_index in (None, index):
            options = {"query_start": t, "backend": "cpu", "tolerance": 0.0, "key_index": key_index}
            one = slice(t, t + 1)
            out = threshold_relative_attention(q[:, :, one], k, v, g[:, :, one], **options)
            torch.testing.assert_close(out, whole[:, :, one], rtol=1e-5, atol=1e-5)
            stats = attention_stats(q[:, :, one], k, g[:, :, one], **options)
            assert torch.equal(stats.kept, read.kept[:, :, one])


def test_long_decode_splits_ranges_without_changing_the_answer():
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 1, 20_000, 16)
    q = torch.randn(1, 1, 1, 16)
    before = torch.get_num_threads()
    try:
        for value in (0.0, -1e-4, -0.7):
            g = torch.full((1, 1, 1), value)
            torch.set_num_threads(1)
            alone = threshold_relative_attention(q, k, v, g, backend="cpu")
            torch.set_num_threads(4)
            shared = threshold_relative_attention(q, k, v, g, backend="cpu")
            expected = threshold_relative_attention(*(x.double() for x in (q, k, v, g)), backend="reference")
            torch.testing.assert_close(alone.double(), expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(shared.double(), expected, rtol=1e-5, atol=1e-5)
    finally:
        torch.set_num_threads(before)


def test_index_skips_blocks_and_changes_nothing():
    torch.manual_seed(0)
    length, width = 6400, 32
    k, v = torch.randn(1, 1, length, width), torch.randn(1, 1, length, width)
    q = torch.randn(1, 1, 1, width)
    k = k - 25 * q / q.norm() * (torch.arange(length) // 64 % 7 != 0).view(1, 1, -1, 1)  # most blocks lean away
    g = torch.zeros(1, 1, 1)
    index = KeyIndex()
    index.append(k)
    plain = threshold_relative_attention(q, k, v, g, backend="cpu", tolerance=0.0)
    skipping = threshold_relative_attention(q, k, v, g, backend="cpu", tolerance=0.0, key_index=index)
    torch.testing.assert_close(skipping, plain, rtol=1e-6, atol=1e-6)
    # It truly does not read them: values and keys turned to NaN without telling the index go unnoticed.
    low, high, _ = index.tensors(length)
    best = torch.maximum(q * low[0, 0], q * high[0, 0]).sum(-1).flatten()
    below = (best < -1).repeat_interleave(64)
    assert 0.2 < below.float().mean() < 0.95
    unseen = threshold_relative_attention(
        q, torch.where(below.view(1, 1, -1, 1), torch.nan, k), v, g, backend="cpu", tolerance=0.0, key_index=index
    )
    assert torch.equal(unseen, skipping)


def test_index_follows_its_cache():
    torch.manual_seed(0)
    k = torch.randn(3, 2, 200, 16)
    whole = KeyIndex()
    whole.append(k)
    pieces = KeyIndex()
    for part in k.split([1, 62, 2, 70, 65], dim=2):
        pieces.append(part)
    for x, y in zip(whole.tensors(200), pieces.tensors(200), strict=True):
        torch.testing.assert_close(x[:, :, :4], y[:, :, :4])
    pieces.truncate(130)
    pieces.append(k[:, :, 130:])
    pieces.truncate(64)
    pieces.append(k[:, :, 64:])
    low, high, norm = pieces.tensors(200)
    blocks = k[:, :, :192].unflatten(2, (3, 64))
    assert (low[:, :, :3] <= blocks.amin(3)).all() and (high[:, :, :3] >= blocks.amax(3)).all()
    assert (norm[:, :, 1:4] >= blocks.norm(dim=-1).amax(-1)).all() and (norm[:, :, 0] >= k.norm(dim=-1).amax(-1)).all()
    whole.reorder(torch.tensor([2, 0, 0]))
    torch.testing.assert_close(whole.tensors(200)[0][0][:, :3], blocks[2].amin(2))
    whole.repeat(2)
    assert whole.tensors(200)[0].shape[0] == 6
    with pytest.raises(InputError, match="200 keys"):
        whole.tensors(201)
    with pytest.raises(InputError, match="does not fit"):
        whole.append(k)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs a resettable peak of memory")
def test_workspace_does_not_grow_with_length():
    """Peak memory of a forward and backward beyond its inputs: a few tensors of size T x D, nothing of size T x T."""
    length, width = 16_384, 16
    inputs = make(batch=1, heads=1, key_heads=1, queries=length, width=width, dtype=torch.float32)

    def step():
        return torch.autograd.grad(threshold_relative_attention(*inputs, backend="cpu").sum(), inputs)

    def held(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

    step()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = held("VmRSS")
    step()
    tensor = length * width * 4 // 1024
    assert held("VmHWM") - before < 10 * tensor + 4096  # KiB; T x T floats would be a million


def _usable_sets():
    return [name for name, usable in cpu.instruction_sets().items() if usable]


def _products_that_underflow():
    """The bits of 1e-40, computed by every thread of torch's pool; 0 in those that flush denormal numbers."""
    return (torch.full((1 << 20,), 1e-30) * 1e-10).view(torch.int32)


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("isa", _usable_sets())
def test_every_thread_gets_its_floating_point_state_back(isa, flush, monkeypatch):
    """Forward, backward and decode, by two threads of torch's own pool, which do not flush by themselves."""
    monkeypatch.setenv(cpu.ISA_VARIABLE, isa)
    inputs = make(batch=1, heads=2, key_heads=1, queries=3000, width=16, dtype=torch.float32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        worker = slice(3 << 18, None)  # torch cuts an elementwise operator into one run per thread
        assert (_products_that_underflow() != 0).all()
        torch.set_flush_denormal(flush)
        for tolerance in (0.0, 2**-24):
            run(inputs, "cpu", tolerance=tolerance)
            with torch.no_grad():
                q, k, v, g = inputs
                threshold_relative_attention(q[:, :, -1:], k, v, g[:, :, -1:], backend="cpu", tolerance=tolerance)
            assert (torch.full((8,), 1e-30) * 1e-10 == 0).all() == flush  # the calling thread
            assert (_products_that_underflow()[worker] != 0).all()
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("isa", _usable_sets())
def test_weights_that_underflow_cost_no_accuracy(isa, flush, monkeypatch):
    """Rows that forget fast read every key: nearly all weights, and their products, are below the normal numbers."""
    monkeypatch.setenv(cpu.ISA_VARIABLE, isa)
    inputs = make(batch=1, queries=400, width=32, dtype=torch.float32)
    with torch.no_grad():
        inputs[2].mul_(torch.logspace(0, -38, 400).view(1, 1, -1, 1))
    expected = oracle(inputs, tolerance=0.0)
    try:
        torch.set_flush_denormal(flush)
        found = run(inputs, "cpu", tolerance=0.0)
    finally:
        torch.set_flush_denormal(False)
    assert_all_close(found, expected, rtol=1e-4, atol=2e-5)
    stats = attention_stats(*inputs[:2], inputs[3], backend="cpu", tolerance=0.0)
    weights = attention_map(*(inputs[i].detach().double() for i in (0, 1, 3)))
    assert torch.equal(stats.kept, weights.keep.sum(-1, dtype=torch.int32))


@pytest.mark.parametrize("isa", _usable_sets())
@pytest.mark.parametrize("queries", [1, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("q_size", "k_size"), [(1e-39, 1.0), (1.0, 1e-39), (1e-25, 1e-18), (1e-7, 1.0), (1e-39, 1e-39)]
)
def test_inputs_that_are_denormal_still_decide(isa, queries, dtype, q_size, k_size, monkeypatch):
    """The kept keys are those of the exact sum even where flushing would make every score 0."""
    monkeypatch.setenv(cpu.ISA_VARIABLE, isa)
    torch.manual_seed(0)
    q = (torch.randn(1, 2, queries, 16) * q_size).to(dtype)
    k, v = (torch.randn(1, 1, 80, 16) * k_size).to(dtype), torch.randn(1, 1, 80, 16).to(dtype)
    g = torch.full((1, 2, queries), -0.1)
    index = KeyIndex()
    index.append(k)
    exact = attention_map(q.double(), k.double(), g.double())
    assert exact.keep.any() or dtype == torch.float16
    expected = threshold_relative_attention(*(x.double() for x in (q, k, v, g)), backend="reference")
    for key_index in (None, index):
        stats = attention_stats(q, k, g, backend="cpu", tolerance=0.0, key_index=key_index)
        assert torch.equal(stats.kept, exact.keep.sum(-1, dtype=torch.int32))
        out = threshold_relative_attention(q, k, v, g, backend="cpu", key_index=key_index)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
