from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.tiny import tiny_config
from traformer.errors import InputError
from traformer.models.from_run import build_model
from traformer.models.memory import available_memory, check_fits, memory_need
from traformer.tasks import build_task


def need_of(training=True, length=64, **changes):
    config = tiny_config(**changes)
    task = build_task(config.task, config.task_options)
    from traformer.models.from_run import build_model_config

    return memory_need(build_model_config(config, task), length, training=training)


@pytest.mark.parametrize("preset", ["tiny", "mini"])
def test_weights_are_counted(preset):
    config = tiny_config(preset=preset, model_options={})
    task = build_task(config.task, config.task_options)
    model = build_model(config, task)
    count = sum(parameter.numel() for parameter in model.parameters())
    fixed = memory_need(model.config, 1, training=False).fixed
    assert fixed == pytest.approx(4 * count, rel=0.05)
    assert memory_need(model.config, 1, training=True).fixed == 4 * fixed  # gradient and two moments


@pytest.mark.parametrize("head_dim", [8, 64])
def test_heads_have_a_width_of_their_own(head_dim):
    options = {
        "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": head_dim, "attention_dropout": 0.0,
    }  # fmt: skip
    config = tiny_config(attention="rope", model_options=options)
    model = build_model(config, build_task(config.task, config.task_options))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert memory_need(model.config, 1, training=False).fixed == pytest.approx(4 * count, rel=0.05)
    saved = need_of(attention="rope", model_options=options).per_sequence
    layers, length = model.config.num_hidden_layers, 64
    floats = (layers + 1) * (6 * 64 + 7 * 8 * head_dim + 5 * 64) + 4 * 64
    assert saved == 4 * floats * length  # within a sixth of what was measured at head sizes of 16 to 256


def test_grows_with_length_linearly_unless_a_square_is_written():
    for attention, factor in (("tra", 2), ("rope", 2), ("t5", 4)):
        options = {"attention_dropout": 0.0}
        short, long = (
            need_of(length=length, attention=attention, model_options=options).per_sequence for length in (2**16, 2**17)
        )
        assert long / short == pytest.approx(factor, rel=0.05), attention
    # torch's fused attention has no dropout on the CPU: with it, RoPE writes a square too.
    fused = need_of(length=2**16, attention="rope", model_options={"attention_dropout": 0.0})
    assert need_of(length=2**16, attention="rope").per_sequence > 10 * fused.per_sequence
    assert need_of(training=False).per_sequence < need_of(training=True).per_sequence


def test_sentence_names_both_sizes():
    check_fits(10, 100, "it", "do less")
    with pytest.raises(InputError, match=r"it needs about 3\.0 GiB of memory and 2\.0 GiB are free.*do less"):
        check_fits(3 * 2**30, 2 * 2**30, "it", "do less")
    assert available_memory() > 2**20


MEASURE = """
import sys, torch
torch.set_num_threads(1)
from traformer.models import TraformerConfig, TraformerForCausalLM
from traformer.models.memory import memory_need

def status(name):
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

name, length, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = TraformerConfig(attention=name, vocab_size=32, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
model = TraformerForCausalLM(config).train()
for size in (16, length):
    ids = torch.randint(1, 32, (batch, size))
    before = status("VmRSS")
    model(ids, labels=ids).loss.backward()
need = memory_need(config, length, training=True, batch=batch)
print((status("VmHWM") - before) / (batch * need.per_sequence))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc, which shows the most memory ever held")
@pytest.mark.parametrize(
    ("attention", "length", "batch"),
    [("cope", 256, 16), pytest.param("cope", 1024, 2, marks=pytest.mark.slow), ("tra_distance_only", 512, 4)],
)
def test_training_needs_what_was_estimated(attention, length, batch):
    """Not more than a tenth above it, and not less than a third of it."""
    command = [sys.executable, "-c", MEASURE, attention, str(length), str(batch)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert 1 / 3 < float(found) < 1.1
