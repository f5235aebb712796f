from __future__ import annotations

import os

import pytest
import torch

from traformer.devices import choose_device, set_threads
from traformer.errors import InputError


def test_cpu_is_cpu():
    assert choose_device("cpu") == choose_device("cpu:0") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda")


@pytest.mark.parametrize("name", ["meta", "gpu", "", "cuda:x", "mkldnn"])
def test_devices_that_cannot_compute(name):
    with pytest.raises(InputError, match=r"give cpu, cuda or auto|not one that torch knows"):
        choose_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there():
    with pytest.raises(InputError, match="sees no CUDA device"):
        choose_device("cuda:3")


def test_threads_within_reason():
    before = torch.get_num_threads()
    try:
        set_threads(None)
        assert torch.get_num_threads() == before
        set_threads(2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    for threads in (0, -1, max(64, 4 * (os.cpu_count() or 1)) + 1, 10**6):
        with pytest.raises(InputError, match=f"threads is {threads}; give 1 to"):
            set_threads(threads)
