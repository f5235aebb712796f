"""Loading that refuses weights which do not fit, and saving with a model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from traformer.models.checks import check_loaded


class SavedModel(PreTrainedModel):
    """What our own models and converted ones share on their way to and from a folder."""

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: Any, *args: Any, strict: bool = True, **kwargs: Any
    ) -> Any:
        """transformers' from_pretrained; with strict, weights that do not fit the configuration are an error.

        strict=False initialises what the checkpoint lacks and ignores what the model lacks.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        path = pretrained_model_name_or_path
        loaded: Any = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)
        model, info = loaded
        if strict:
            check_loaded(info, path, model.config.attention)
        return (model, info) if wants_info else model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """transformers' save_pretrained, and a model card where the folder has none."""
        super().save_pretrained(save_directory, *args, **kwargs)
        card = Path(save_directory) / "README.md"
        if kwargs.get("is_main_process", True) and not card.exists():
            card.write_text(self.model_card(card.parent.name), encoding="utf-8")

    def model_card(self, folder: str) -> str:
        """The card as Markdown."""
        raise NotImplementedError
