"""These tests run where kernels run: on a GPU (`make test-gpu`), or in a process with TRITON_INTERPRET=1 on a CPU.

Anywhere else they are not collected; ../test_in_interpreter.py starts such a process, since triton decides when it is
first imported whether it interprets.
"""

import os
import warnings
from importlib.util import find_spec

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if find_spec("triton") is None or not (INTERPRETED or torch.cuda.is_available()):
    collect_ignore_glob = ["test_*.py"]
elif INTERPRETED:
    from tests.ops.triton.interpreter import patch_once_per_launch
    from traformer.ops.threshold_relative.triton import configurations

    patch_once_per_launch()
    # Interpreted operations cost the same whatever their size: few large tiles, but more than one each way.
    for (_kernel, size), table in configurations._TABLE.items():
        if size == 4:
            for limit in table:
                table[limit] = configurations.Configuration(64, 32, 4)
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy's, on values that are masked later


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(autouse=True)
def interpreter_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
