"""The model card that goes with saved weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from traformer import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CARD = """\
---
library_name: traformer
pipeline_tag: text-generation
tags:
- traformer
- length-generalisation
- {attention}
---

# A Traformer decoder with attention `{attention}`

{layers} layers, {heads} heads ({key_heads} key heads) of size {head_dim}, width {width}, vocabulary {vocabulary}: \
{parameters:,} parameters. Residual `{residual}`, QK-norm {qk_norm}{options}.

```python
import traformer.models  # registers the model with transformers
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{folder}")
tokens = model.generate(input_ids, max_new_tokens=32)
```

Saved by traformer {version}. What it was trained on, how it was evaluated and what it must not be used for is for those
who trained it to add here.
"""


def model_card(model: PreTrainedModel, folder: str) -> str:
    """The card as Markdown."""
    config: Any = model.config
    options = ", ".join(f"{name} = {value}" for name, value in sorted(config.attention_options.items()))
    return _CARD.format(
        attention=config.attention,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        width=config.hidden_size,
        vocabulary=config.vocab_size,
        parameters=model.num_parameters(),
        residual=config.residual,
        qk_norm="on" if config.qk_norm else "off",
        options=f"; {options}" if options else "",
        folder=folder,
        version=__version__,
    )


def write_model_card(model: PreTrainedModel, folder: str | Path) -> None:
    """Write README.md into the folder unless there is one: what somebody wrote there stays."""
    path = Path(folder) / "README.md"
    if not path.exists():
        path.write_text(model_card(model, Path(folder).name), encoding="utf-8")
