"""Every command that runs a model flushes denormal numbers in all of torch's threads while it does, and only then.

On Intel an operation on a denormal number takes some 150 cycles, and weights of far keys underflow in every method.
"""

from __future__ import annotations

import pytest
import torch

from tests.commands.test_bad_input import TINY
from traformer.devices import flush_denormals
from traformer.models import TraformerModel
from traformer.ops.threshold_relative import cpu

needs_kernel = pytest.mark.skipif(cpu.unavailable_reason() is not None, reason="torch's pool needs the kernel's help")


def flushes() -> tuple[bool, bool]:
    """Whether products that underflow are 0 in this thread, and in every thread of torch's pool."""
    here = torch.full((8,), 1e-30) * 1e-10
    everywhere = torch.full((1 << 20,), 1e-30) * 1e-10  # torch cuts it into one run for each thread
    return bool((here == 0).all()), bool((everywhere.view(torch.int32) == 0).all())


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    assert flushes() == (False, False)
    yield
    assert flushes() == (False, False)  # the state before is back in every thread
    torch.set_num_threads(before)


@needs_kernel
def test_all_threads_within_the_block_and_none_after(two_threads):
    with flush_denormals():
        assert flushes() == (True, True)
        with flush_denormals():
            assert flushes() == (True, True)
        assert flushes() == (True, True)
    assert flushes() == (False, False)
    with pytest.raises(KeyError), flush_denormals():
        raise KeyError


def test_without_the_kernel_the_calling_thread(two_threads, monkeypatch):
    monkeypatch.setattr(cpu, "_load", lambda: (None, "not built"))
    with flush_denormals():
        assert flushes()[0]
    assert not flushes()[0]


@needs_kernel
@pytest.mark.parametrize(
    "argv",
    [
        [*TINY, "--out", "new", "--batch-size", "2"],
        ["eval", "rope", "--lengths", "16", "--examples", "2"],
        ["eval", "text", "--lengths", "16", "--examples", "1"],
        ["stretch", "tra", "--lengths", "16", "--examples", "1", "--split", "iid"],
        ["diagnose", "rope", "--lengths", "16", "--examples", "1"],
        ["generate", "rope", "--prompt", "w 1", "--max-new-tokens", "2"],
        ["explore", "rope", "--lengths", "12"],
    ],
    ids=lambda argv: " ".join(argv[:2]),
)
def test_commands_that_run_a_model(argv, runs, tra, two_threads, monkeypatch):
    seen: list[tuple[bool, bool]] = []

    def watched(method):
        def call(self, *args, **kwargs):
            seen.append(flushes())
            return method(self, *args, **kwargs)

        return call

    monkeypatch.setattr(TraformerModel, "forward", watched(TraformerModel.forward))
    monkeypatch.setattr(torch.optim.AdamW, "step", watched(torch.optim.AdamW.step))
    done = tra(*argv, "--threads", "2")
    assert done.status == 0, done.err
    assert seen and set(seen) == {(True, True)}
