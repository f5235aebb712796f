"""The example of docs/training.md, run as it stands."""

from __future__ import annotations

import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "training.md"


def blocks(word: str) -> list[str]:
    return [
        code
        for code in re.findall(r"```python tested by \S+\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
        if word in code
    ]


def test_the_model_trains_under_transformers_own_trainer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("Trainer(")
    names: dict = {}
    exec(compile(code, str(DOCUMENT), "exec"), names)
    losses = [entry["loss"] for entry in names["trainer"].state.log_history if "loss" in entry]
    assert len(losses) == 4 and losses[-1] < 0.8 * losses[0]
    # Its checkpoint is a model, and it goes on from it.
    from traformer import TraformerForCausalLM

    saved = tmp_path / "runs" / "trainer" / "checkpoint-20"
    TraformerForCausalLM.from_pretrained(saved)
    names["trainer"].train(resume_from_checkpoint=str(saved))
    assert names["trainer"].state.global_step == 40


def test_the_sweep_example_is_a_list_of_cells():
    (code,) = blocks("def cells")
    names: dict = {}
    exec(compile(code, str(DOCUMENT), "exec"), names)
    cells = names["cells"]()
    assert len(cells) == 6 and len({cell.name for cell in cells}) == 6
