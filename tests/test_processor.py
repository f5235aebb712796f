"""The guard against processors that announce AMX and have no tiles: only on such a machine can it crash."""

import logging
import os
import subprocess
import sys

import pytest

from traformer import processor
from traformer.ops import available_backends


@pytest.fixture
def unset(monkeypatch):
    monkeypatch.setenv(processor.ONEDNN_VARIABLE, "")  # so that monkeypatch restores what was there
    monkeypatch.delenv(processor.ONEDNN_VARIABLE)


def test_broken_amx_limits_onednn_and_says_so(monkeypatch, unset, caplog):
    monkeypatch.setattr(processor, "amx_is_broken", lambda: True)
    with caplog.at_level(logging.DEBUG, logger="traformer.processor"):
        processor.avoid_broken_amx()
        processor.avoid_broken_amx()
    assert os.environ[processor.ONEDNN_VARIABLE] == processor.WITHOUT_AMX
    assert len(caplog.records) == 1 and processor.ONEDNN_VARIABLE in caplog.text


def test_sound_processor_is_left_alone(monkeypatch, unset):
    monkeypatch.setattr(processor, "amx_is_broken", lambda: False)
    processor.avoid_broken_amx()
    assert processor.ONEDNN_VARIABLE not in os.environ


def test_a_value_of_the_users_own_stays(monkeypatch):
    monkeypatch.setenv(processor.ONEDNN_VARIABLE, "AVX2")
    monkeypatch.setattr(processor, "amx_is_broken", lambda: True)
    processor.avoid_broken_amx()
    assert os.environ[processor.ONEDNN_VARIABLE] == "AVX2"


def test_without_a_kernel_nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setenv(processor.LIBRARY_VARIABLE, str(tmp_path / "missing.so"))
    assert processor.amx_is_broken() is False


@pytest.mark.skipif("cpu" not in available_backends(), reason="the kernel is not compiled")
def test_bfloat16_products_survive_the_import():
    """The first bfloat16 product after the import, in a process of its own and with the variable unset."""
    code = """
import traformer.ops, torch
x = torch.arange(256.0).reshape(16, 16)
exact = x @ x.T
assert torch.allclose((x.bfloat16() @ x.bfloat16().T).float(), exact, rtol=2**-7)
a = torch.ones(512, 512, dtype=torch.bfloat16)
assert (a @ a == 512).all()
"""
    clean = {name: value for name, value in os.environ.items() if name != processor.ONEDNN_VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True)
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr}"
