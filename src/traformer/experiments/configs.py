"""Whole runs by name, for `tra train --config NAME`; flags given beside it win. Loads without torch."""

from __future__ import annotations

from pathlib import Path

from traformer.errors import unknown_name
from traformer.runs.config import RunConfig

# The paper's language model: medium, window 128, batch 64, 100,000 steps, GPT-2's vocabulary. Its learning rate is not
# published; 3e-4 is our choice. TRA has 72,500,800 parameters, 51,463,168 of them in the two vocabulary matrices.
TEXT_PAPER = RunConfig(
    task="text",
    task_options={"data": ["wikitext-103-raw"], "tokenizer": "gpt2", "length": 128},
    preset="medium",
    steps=100_000,
    batch_size=64,
    lr=3e-4,
    log_every=100,
    save_every=1000,
)

# About half an hour on two cores: 7 million tokens of the built-in text, a BPE of 4,096 entries trained on it. Another
# text: --task-option data=FOLDER or data=wikitext-103-raw.
TEXT_LAPTOP = RunConfig(
    task="text",
    task_options={"data": ["python-stdlib"], "tokenizer": "bpe:4096", "length": 128},
    preset="mini",
    model_options={"attention_dropout": 0.0},  # torch's fused kernel, which the peers use, has none on a CPU
    steps=900,
    batch_size=64,
    lr=1e-3,
    clip=1.0,
    log_every=50,
    save_every=250,
)

# Some ten minutes on one core: 6 million bytes of the same text, 4 layers of 128. What `tra sweep text` trains with
# every attention.
TEXT_SMALL = RunConfig(
    task="text",
    task_options={"data": ["python-stdlib"], "tokenizer": "bytes", "length": 128},
    preset="tiny",
    model_options={"attention_dropout": 0.0, "hidden_dropout": 0.0, "num_hidden_layers": 4},
    steps=1500,
    batch_size=32,
    lr=3e-3,
    clip=1.0,
    log_every=50,
    save_every=250,
    keep=1,
)

CONFIGS = {"text-paper": TEXT_PAPER, "text-laptop": TEXT_LAPTOP, "text-small": TEXT_SMALL}


def read_config(name: str) -> RunConfig:
    """A config by name, or of a YAML file."""
    if name in CONFIGS:
        return CONFIGS[name]
    if not Path(name).exists() and Path(name).suffix not in (".yaml", ".yml"):
        raise unknown_name("config", name, CONFIGS)
    return RunConfig.from_file(name)
