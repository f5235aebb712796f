"""`model.explore(ids)`: what each head of a model looks at, as a page in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from traformer.reports.inline import Page


class ExploredModel:
    """Mixed into the language models, our own and converted ones."""

    def explore(
        self,
        input_ids: Tensor | Sequence[int],
        *,
        decode: Callable[[list[int]], str] | None = None,
        answers: Tensor | Sequence[bool] | None = None,
        title: str | None = None,
    ) -> Page:
        """The page of `tra explore` for one sequence: shown in a notebook's cell, written by its `save(path)`.

        input_ids   [T] or [1, T]
        decode      the text of a list of ids, such as `tokenizer.decode` or `task.decode`; by default ids are numbers
        answers     [T] or [1, T], True where the page compares the model's prediction with the token
        title       the page's title

        The model is looked at in eval mode and left in the mode it was in.
        """
        # Upwards in the layout, and loaded only here: a page is made of a model, never the reverse.
        from traformer.evaluation.explore import explore_model
        from traformer.reports.explore import explore_page

        return explore_page(explore_model(self, input_ids, decode=decode, answers=answers, title=title))
