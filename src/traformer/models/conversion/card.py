"""The model card that goes with a converted model's weights."""

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

# {source} with attention `{attention}`

Converted by traformer {version}: {layers} layers, {heads} heads ({key_heads} key heads) of size {head_dim}, \
{parameters:,} parameters. Its own attention and positions were replaced; QK-norm {qk_norm}{options}.

```python
import traformer.models  # registers the model with transformers
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{folder}")
```

The licence of {source} goes on to hold. What it was tuned on and how it was evaluated is for whoever
tuned it to add here.
"""


def write_converted_card(model: PreTrainedModel, folder: str | Path) -> None:
    """Write README.md into the folder unless there is one: what somebody wrote there stays."""
    path = Path(folder) / "README.md"
    if path.exists():
        return
    config: Any = model.config
    options = ", ".join(f"{name} = {value}" for name, value in sorted(config.attention_options.items()))
    text = _CARD.format(
        attention=config.attention,
        source=config.converted_from or f"A {config.model_type.removeprefix('traformer_')} model",
        version=__version__,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        parameters=model.num_parameters(),
        qk_norm="ours" if config.qk_norm else "as the source has it",
        options=f"; {options}" if options else "",
        folder=Path(folder).name,
    )
    path.write_text(text, encoding="utf-8")
