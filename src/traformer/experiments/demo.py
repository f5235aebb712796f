"""The demo: TRA and RoPE in the same trunk, same steps and rate, on two tasks, measured to 8 times the length."""

from __future__ import annotations

from traformer.runs.config import RunConfig
from traformer.sweeps.cell import Cell

TITLE = "Trained short, tested long: TRA and RoPE in the same decoder"

ATTENTIONS = ("tra", "rope")

# Small enough for minutes on two cores; the rate is the same for both attentions and was not searched per method.
NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
FLIP_FLOP = RunConfig(
    task="flip_flop",
    task_options={"length": 64},
    preset="tiny",
    model_options={"num_attention_heads": 4, **NO_DROPOUT},
    steps=1200,
    batch_size=32,
    lr=1e-3,
    log_every=50,
    save_every=250,
    threads=1,
)
INDUCTION = RunConfig(
    task="induction",
    task_options={"max_length": 20, "symbols": 16},
    preset="tiny",
    model_options={"num_attention_heads": 4, "head_dim": 64, **NO_DROPOUT},
    steps=1500,
    batch_size=64,
    lr=2e-3,
    log_every=50,
    save_every=250,
    threads=1,
)


def cells(seed: int = 0) -> list[Cell]:
    """Four runs: two tasks, two attentions. The slower ones first, so that two cores are busy to the end."""
    flip_flop = [
        Cell(f"flip_flop-{name}", FLIP_FLOP.replace(attention=name, seed=seed), "64,128,256,512", 256)
        for name in ATTENTIONS
    ]
    induction = [
        Cell(f"induction-{name}", INDUCTION.replace(attention=name, seed=seed), "20,40,80,120,160", 256)
        for name in ATTENTIONS
    ]
    return sorted([*flip_flop, *induction], key=lambda cell: cell.config.attention != "tra")
