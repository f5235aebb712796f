"""The model card that goes with saved weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from traformer import __version__
from traformer.methods import StackConfig, stack_of

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

# {title}

{facts}

```python
import traformer.models  # registers the model with transformers
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{folder}")
tokens = model.generate(input_ids, max_new_tokens=32)
```

{closing}
"""


def model_card(model: PreTrainedModel, folder: str) -> str:
    """The card of a decoder of ours."""
    config: Any = model.config
    return _CARD.format(
        attention="\n- ".join(_names(config)),
        title=f"A Traformer decoder with attention `{', '.join(_names(config))}`",
        facts=f"{_shape(model)}, width {config.hidden_size}, vocabulary {config.vocab_size}. Residual "
        f"`{config.residual}`, QK-norm {_norm(config, 'on', 'off')}{_options(config)}.",
        folder=folder,
        closing=f"Saved by traformer {__version__}. What it was trained on, how it was evaluated and what it must not "
        "be used for is for those\nwho trained it to add here.",
    )


def converted_card(model: PreTrainedModel, folder: str) -> str:
    """The card of another's model with attention of ours."""
    config: Any = model.config
    source = config.converted_from or f"A {config.model_type.removeprefix('traformer_')} model"
    return _CARD.format(
        attention="\n- ".join(_names(config)),
        title=f"{source} with attention `{', '.join(_names(config))}`",
        facts=f"Converted by traformer {__version__}: {_shape(model)}. Its own attention and positions were replaced; "
        f"QK-norm {_norm(config, 'ours', 'as the source has it')}{_options(config)}.",
        folder=folder,
        closing=f"The licence of {source} still applies. What it was tuned on and how it was evaluated is for those"
        "\nwho tuned it to add here.",
    )


def _shape(model: PreTrainedModel) -> str:
    config: Any = model.config
    return (
        f"{config.num_hidden_layers} layers, {config.num_attention_heads} heads "
        f"({config.num_key_value_heads} key heads) of size {config.head_dim}, {model.num_parameters():,} parameters"
    )


def _names(config: StackConfig) -> list[str]:
    """The methods of the stack, each once."""
    return list(dict.fromkeys(method.attention for method in stack_of(config)))


def _norm(config: StackConfig, on: str, off: str) -> str:
    norms = {on if method.qk_norm else off: None for method in stack_of(config)}
    return ", ".join(norms) + (" by layer" if len(norms) > 1 else "")


def _options(config: StackConfig) -> str:
    """The options; in a stack of several methods, with the layers that have them."""
    stack = stack_of(config)
    alike = all(method.is_same(stack[0]) for method in stack)
    found = []
    for index, method in enumerate(stack[:1] if alike else stack):
        options = ", ".join(f"{name} = {value}" for name, value in sorted(method.options.items()))
        found.append(options if alike else f"layer {index}: {method.attention}" + (f" ({options})" if options else ""))
    text = "; ".join(found)
    return f"; {text}" if text else ""
