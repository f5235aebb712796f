"""`convert`: an attention of ours in a Hugging Face decoder that somebody has trained already."""

from __future__ import annotations

import copy as copies
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from traformer.errors import InputError
from traformer.methods import Method, resolve_stack, stack_of
from traformer.models.conversion.families import FAMILIES, ConvertedForCausalLM, Family


def convert(
    model: PreTrainedModel,
    attention: str | Sequence[str] = "tra",
    *,
    qk_norm: bool | None = None,
    keep_positions: bool = False,
    copy: bool = True,
    **attention_options: Any,
) -> ConvertedForCausalLM:
    """The same decoder with another attention: weights kept, positions removed, the method's own parameters added.

    model              a causal language model of the families Llama, Mistral, Qwen2, Qwen3 or GPT-2, its weights plain
                       floats (as they are after loading a GGUF file)
    attention          a name of the catalogue (traformer.methods), a method or a named configuration; or several:
                       one per layer, or a pattern that repeats
    qk_norm            True: queries and keys are RMS-normalised without a learned scale, as in TRA as published (a norm
                       of the model's own, as in Qwen3, then goes); False: scores stay as the model was trained to make
                       them. By default True for TRA, unless the model has a norm of its own, and False for the others
    keep_positions     GPT-2: keep adding its learned positions, which end at its trained length; else they are removed
                       and only their mean stays, added to every token embedding
    copy               False: the new model reuses the given one's tensors, which must then no longer be used
    attention_options  the method's own options; of several attentions: `name={option: value}`

    The result trains, generates, saves and loads as the given model did; after `import traformer.models`,
    AutoModelForCausalLM.from_pretrained reads it. A gate starts with a decay of its own for each head (ALiBi's slopes,
    down to 1/256 per key, unless the options say how it starts), equal for all tokens. Sliding windows go: a converted
    layer may look at all that came before. To be of use, a converted model must be tuned.
    """
    family = _family_of(model)
    has_own = any(name.endswith(".q_norm.weight") for name, _ in model.named_parameters())
    stack = []
    for method in resolve_stack(attention, attention_options, model.config.num_hidden_layers):
        named = method.qk_norm if qk_norm is None else qk_norm
        stack.append(replace(method, qk_norm=method.is_tra and not has_own if named is None else named))
    config = _converted_config(family, model, stack, keep_positions)
    weights = _renamed(family, model, config)
    with torch.device("meta"):  # no memory, no time: all tensors come from the source
        converted = family.model(config)
    if copy:
        weights = {name: tensor.clone() for name, tensor in weights.items()}
    _fill(converted, weights)
    converted.generation_config = copies.deepcopy(model.generation_config)
    return converted.train(model.training)  # type: ignore[return-value]


def _family_of(model: Any) -> Family:
    known = [family.source.__name__ for family in FAMILIES.values()]
    if isinstance(model, ConvertedForCausalLM):
        raise InputError(f"the model is a converted one already, with attention {model.config.attention!r}")
    if not isinstance(model, PreTrainedModel):
        hint = "; merge its adapters first (merge_and_unload)" if hasattr(model, "merge_and_unload") else ""
        raise InputError(f"convert takes a transformers model, not {type(model).__name__}{hint}")
    family = FAMILIES.get(model.config.model_type)
    if family is None:
        kind = "no decoder alone" if model.config.is_encoder_decoder else "of no family that can be converted"
        raise InputError(f"{type(model).__name__} is {kind}. Known: {', '.join(known)}")
    if not isinstance(model, family.source):
        raise InputError(f"convert takes a {family.source.__name__} of this family, not {type(model).__name__}")
    quantised = _quantised_weight(model)
    if quantised is not None:
        raise InputError(f"the model's weights are quantised ({quantised}); load it without quantisation to convert it")
    if getattr(model.config, "add_cross_attention", False):
        raise InputError("the model has cross-attention, so it is no decoder alone and cannot be converted")
    return family


def _quantised_weight(model: PreTrainedModel) -> str | None:
    """The name of a weight that is not a plain tensor of floats.

    A quantizer alone says nothing: a GGUF file's weights are unpacked on loading, and the model keeps its quantizer.
    """
    plain = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor or parameter.dtype not in plain:
            return name
    packed = (name for name, buffer in model.named_buffers() if buffer.dim() == 2 and not buffer.is_floating_point())
    return next((name for name in packed if hasattr(model.get_submodule(name.rpartition(".")[0]), "in_features")), None)


def _converted_config(
    family: Family, model: PreTrainedModel, stack: list[Method], keep_positions: bool
) -> PretrainedConfig:
    trunk: Any = model.base_model
    has_learned = hasattr(trunk, "wpe")
    if keep_positions and not has_learned:
        raise InputError(
            f"keep_positions is for models that add learned positions (GPT-2); {type(model).__name__} has none"
        )
    settings = model.config.to_dict()
    for name in ("model_type", "architectures", "transformers_version", "quantization_config"):
        settings.pop(name, None)
    for name, without in (("sliding_window", None), ("use_sliding_window", False), ("layer_types", None)):
        if name in settings:
            settings[name] = without
    all_options = []
    for method in stack:
        options = dict(method.options)
        if method.attention == "rope" and "theta" not in options:
            options["theta"] = _theta(model.config)
        if method.attention == "learned" and has_learned:
            if keep_positions:
                raise InputError("attention 'learned' has positions of its own; leave keep_positions out")
            options.setdefault("max_positions", trunk.wpe.num_embeddings)
        all_options.append(options)
    embedding: Any = trunk.get_input_embeddings().weight
    settings |= {
        "attention": [method.attention for method in stack],
        "attention_options": all_options,
        "qk_norm": [method.qk_norm for method in stack],
        "keep_positions": keep_positions,
        "embedding_range": math.sqrt(3.0) * float(embedding.detach().float().square().mean().sqrt()),
        "converted_from": model.config.name_or_path or None,
    }
    return family.config(**settings)


def _theta(config: Any) -> float:
    """The base of the source's rotary embedding, so that "rope" stays what it was."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        raise InputError(
            f"the model scales its rotary embedding ({kind}), which attention 'rope' does not; pass theta to start "
            "from plain rotary embedding"
        )
    return float(parameters.get("rope_theta", 10_000.0))


def _renamed(family: Family, model: PreTrainedModel, config: Any) -> dict[str, Tensor]:
    """The source's tensors under the converted model's names."""
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if family.name == "gpt2":
        weights = _split_gpt2(weights, config)
    stack = stack_of(config)
    for name in list(weights):
        own_norm = re.search(r"\.(\d+)\.[^.]+\.[qk]_norm\.weight$", name)
        if own_norm and stack[int(own_norm[1])].qk_norm:  # ours takes its place
            del weights[name]
    return weights


def _split_gpt2(weights: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The fused projection as three, weights [in, out] as [out, in], and positions where they go."""
    split: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        layer, inside, rest = name.rpartition(".attn.")
        if rest in ("c_attn.weight", "c_attn.bias"):
            kind = rest.removeprefix("c_attn.")
            for letter, part in zip("qkv", tensor.chunk(3, dim=-1), strict=True):
                split[f"{layer}.attn.{letter}_proj.{kind}"] = part.t().contiguous() if kind == "weight" else part
        elif rest in ("c_proj.weight", "c_proj.bias"):
            split[f"{layer}.attn.o_proj.{rest.removeprefix('c_proj.')}"] = tensor.t() if "weight" in rest else tensor
        elif not inside:
            split[name] = tensor
    if config.keep_positions:
        return split
    positions = split.pop("transformer.wpe.weight")
    learned = [(index, method) for index, method in enumerate(stack_of(config)) if method.attention == "learned"]
    if learned:
        index, method = learned[0]
        rows = method.options["max_positions"]
        if rows <= positions.shape[0]:
            split[f"transformer.h.{index}.attn.position_table.weight"] = positions[:rows]
        return split
    # The stream keeps its centre. A head that is tied to the embedding then adds the same to every token's logit, which
    # changes no probability.
    centred = split["transformer.wte.weight"] + positions.mean(0)
    if config.tie_word_embeddings:
        split["lm_head.weight"] = centred
    split["transformer.wte.weight"] = centred
    return split


@torch.no_grad()
def _fill(converted: Any, weights: dict[str, Tensor]) -> None:
    """Give a model on the meta device its weights, and start what the source has not."""
    missing, unexpected = converted.load_state_dict(weights, strict=False, assign=True)
    converted.tie_weights()
    layers = converted.base_model.attention_layers
    added = {id(p) for layer in layers for p in layer.parameters() if p.is_meta}
    strange = [name for name in missing if id(converted.get_parameter(name)) not in added and name != "lm_head.weight"]
    if unexpected or strange:
        raise InputError(f"the model's tensor {[*unexpected, *strange][0]!r} is not one that its family has")
    for layer in layers:
        home = layer.q_proj.weight
        for module in layer.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and parameter.is_meta:
                    own = nn.Parameter(torch.empty(parameter.shape, dtype=home.dtype, device=home.device))
                    vars(own).update(vars(parameter))  # such as a factor on its learning rate
                    module._parameters[name] = own
                elif parameter is not None:
                    parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # it came from the source
        layer.start_added()
