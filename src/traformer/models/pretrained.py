"""A model that training starts from (`tra train --from DIR`): a run's newest checkpoint, or a saved model's folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traformer.errors import InputError, RunError, first_line
from traformer.models.from_run import CONVERTED, DECIDED_BY_RUN, check_vocabulary, load_weights
from traformer.runs.config import RunConfig
from traformer.runs.folder import RunFolder
from traformer.tasks.text import TOKENIZER_FOLDER
from traformer.types import JsonObject

if TYPE_CHECKING:
    from torch import nn

    from traformer.tasks import Task

_NOT_SETTINGS = (*DECIDED_BY_RUN, "format_version", "use_cache", "bos_token_id", "eos_token_id", "tie_word_embeddings")


def weights_folder(path: str | Path) -> Path:
    """The folder with config.json and model.safetensors: that of a run's newest whole checkpoint, or `path` itself."""
    path = Path(path)
    if RunFolder(path).is_run():
        return RunFolder(path).find_checkpoint().path
    for name in ("config.json", "model.safetensors"):
        if not (path / name).is_file():
            raise RunError(f"{path} is neither a run folder nor a saved model: it has no {name}; give another --from")
    return path


def read_model_config(path: str | Path) -> Any:
    """The config of the model in `path`; it must be one of ours or a converted one."""
    from transformers import AutoConfig, PretrainedConfig

    import traformer.models  # tells transformers of our models
    from traformer.models.conversion.configs import CONFIGS

    folder = weights_folder(path)
    try:
        kind = PretrainedConfig.get_config_dict(str(folder))[0].get("model_type")
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / 'config.json'} cannot be read: {first_line(error)}; give another --from") from None
    known = [traformer.models.TraformerConfig.model_type, *(config.model_type for config in CONFIGS.values())]
    if kind not in known:
        hint = "; convert it first: tra convert" if f"traformer_{kind}" in known else ""
        raise InputError(
            f"{path} holds a model of type {kind!r}; --from takes runs, models of type 'traformer', and converted "
            f"models{hint}"
        )
    return AutoConfig.from_pretrained(str(folder))


def settings_from(path: str | Path) -> JsonObject:
    """The settings of a run that starts from `path`: its model, and where they are known its task and tokenizer."""
    from traformer.models import TraformerConfig

    found = read_model_config(path)
    settings = _attention_settings(found, path)
    if isinstance(found, TraformerConfig):
        names = TraformerConfig.__annotations__
        own = [item.name for item in dataclasses.fields(TraformerConfig) if item.name in names]
        settings["model_options"] = {name: getattr(found, name) for name in own if name not in _NOT_SETTINGS}
    else:
        settings |= {"preset": CONVERTED, "model_options": {}}
    if (Path(path) / "tokenizer.json").is_file():
        settings.update(task="text", task_options={"tokenizer": str(Path(path).absolute())})
    if RunFolder(path).is_run():
        config = RunFolder(path).read_config()
        options = dict(config.task_options)
        if str(options.get("tokenizer", "")).startswith("bpe:"):  # trained on that run's text, and kept with it
            options["tokenizer"] = str(Path(path).absolute() / TOKENIZER_FOLDER)
        settings.update(task=config.task, task_options=options, attention=config.attention)
        settings.update(attention_options=dict(config.attention_options))
    return settings


def _attention_settings(found: Any, path: str | Path) -> JsonObject:
    """Attention and options of a model as a run's config has them: of a mixture, names and a mapping from them."""
    if isinstance(found.attention, str) and isinstance(found.attention_options, dict):
        return {"attention": found.attention, "attention_options": dict(found.attention_options)}
    names = list(found.attention)
    given = list(found.attention_options)
    options: JsonObject = {}
    for name, own in zip(names, given, strict=True):
        if options.setdefault(name, own) != own:
            raise InputError(f"{path} uses {name} with different options in different layers; give its run folder")
    pattern = next(names[:size] for size in range(1, len(names) + 1) if names == names[:size] * (len(names) // size))
    if len(pattern) == 1:
        return {"attention": names[0], "attention_options": options[names[0]]}
    return {"attention": ",".join(pattern), "attention_options": options}


def check_start(config: RunConfig, task: Task) -> None:
    """Refuse a damaged model, or one whose tokens are not the task's, before the run folder is made."""
    from safetensors import SafetensorError, safe_open

    assert config.from_model is not None
    weights = weights_folder(config.from_model) / "model.safetensors"
    try:
        with safe_open(weights, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise RunError(f"{weights} is damaged ({first_line(error)}); copy or save the model again") from None
    vocabulary = read_model_config(config.from_model).vocab_size
    if config.preset == CONVERTED:
        check_vocabulary(vocabulary, task, config.from_model)
    elif vocabulary != task.vocab_size:
        raise InputError(
            f"{config.from_model} has a vocabulary of {vocabulary} tokens, but {task.name} has {task.vocab_size}; "
            "give the task (and tokenizer) that it was trained with"
        )


def load_start(model: nn.Module, path: str | Path) -> None:
    """The weights of `path` into a new model of the same shape."""
    load_weights(model, weights_folder(path))
