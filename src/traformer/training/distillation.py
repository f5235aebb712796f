"""Learning from the model that was converted: each attention layer by itself, or the whole model by its probabilities.

Both are modules that the training loop runs in place of `AnswerLoss`, with the same inputs; the teacher is not a part
of them, so that nothing of it is trained, sharded or saved.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from traformer.errors import InputError
from traformer.layers.context import make_context
from traformer.models.conversion.families import ConvertedForCausalLM
from traformer.models.loss import add_gradients, chunk_rows, scaled_gradients
from traformer.training.loss import AnswerLoss, answer_states


def load_teacher(name: str, model: Any, device: torch.device) -> Any:
    """The frozen source of a converted model; another shape or vocabulary is refused."""
    from traformer.models.sources import load_source

    if not isinstance(model, ConvertedForCausalLM):
        raise InputError("a teacher is for a converted model (tra convert); the model of --from is none")
    teacher = load_source(name)[0]
    mine = model.config
    for setting in ("vocab_size", "hidden_size", "num_hidden_layers"):
        theirs, ours = getattr(teacher.config, setting), getattr(mine, setting)
        if theirs != ours:
            raise InputError(
                f"the teacher {name} has {setting} {theirs} and the model {ours}; give the model that was converted"
            )
    if f"traformer_{teacher.config.model_type}" != mine.model_type:
        raise InputError(
            f"the teacher {name} is of type {teacher.config.model_type!r} and the model of type {mine.model_type!r}; "
            "give the model that was converted"
        )
    return teacher.to(device).eval().requires_grad_(False)


def new_layers(model: Any, length: int) -> list[int]:
    """The layers that may differ from the source's in windows of `length` tokens: all but plain rotary ones."""
    is_rotary = hasattr(model.config, "rope_parameters")
    return [
        index
        for index, layer in enumerate(model.base_model.attention_layers)
        if not (is_rotary and layer.name == "rope" and not layer.qk_norm and (layer.window or length) >= length)
    ]


class LayerLoss(AnswerLoss):
    """A converted model whose new attention layers are compared with the source's, each on the source's own input.

    The teacher runs once; what goes into and comes out of its attention layers is the example that each new layer
    learns from. No gradient passes from one layer to another.
    """

    def __init__(self, model: Any, teacher: Any, length: int) -> None:
        super().__init__(model)
        self.layers = new_layers(model, length)
        if not self.layers:
            raise InputError(
                "every layer is the source's own at this length, so --objective layers has nothing to learn"
            )
        self._teacher = (teacher,)  # in a tuple: not a module of this one

    def parts_to_shard(self) -> list[nn.Module]:
        """The layers that run; the blocks around them do not."""
        return [self.model.base_model.attention_layers[index] for index in self.layers]

    def forward(self, input_ids: Tensor, answers: Tensor) -> tuple[Tensor, None]:
        """The mean relative error of the layers' outputs, times the number of answers; no token is predicted.

        Errors are of whole sequences, so that it does not matter how a batch is divided among processes.
        """
        seen = self._watch(input_ids)
        trunk = self.model.base_model
        x = seen[self.layers[0]][0]
        context, _ = make_context(x, None, None, None, None, None)
        for leader in trunk.leaders:
            context.shared[leader] = trunk.attention_layers[leader].prepare(context, x)
        errors = []  # of each layer, [B]
        for index in self.layers:
            given, wanted = seen[index]
            made, _ = trunk.attention_layers[index](given, context)
            errors.append(relative_error(made, wanted))
        return (torch.stack(errors).mean(0) * answers[:, 1:].sum(1)).sum(), None

    @torch.no_grad()
    def _watch(self, input_ids: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """Input and output [B, T, E] of the teacher's attention in every new layer."""
        trunk, names = self._teacher[0].base_model, self.model.base_model
        seen: dict[int, tuple[Tensor, Tensor]] = {}
        handles = []
        for index in self.layers:
            attention = getattr(getattr(trunk, names.blocks_name)[index], names.attention_name)

            def keep(
                module: nn.Module, given: tuple[Any, ...], keywords: dict[str, Any], made: Any, index: int = index
            ) -> None:
                hidden = keywords["hidden_states"] if "hidden_states" in keywords else given[0]
                seen[index] = (hidden, made[0])

            handles.append(attention.register_forward_hook(keep, with_kwargs=True))
        try:
            trunk(input_ids=input_ids, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return seen


def relative_error(made: Tensor, wanted: Tensor) -> Tensor:
    """[B, T, E] -> [B]: squared distance over the squared size of what was wanted, both summed over a sequence."""
    made, wanted = made.float(), wanted.float()
    return (made - wanted).square().sum((1, 2)) / wanted.square().sum((1, 2)).clamp_min(1e-12)


class LogitLoss(AnswerLoss):
    """A converted model with the distance of its probabilities to the teacher's, and to the tokens."""

    def __init__(self, model: Any, teacher: Any, teacher_weight: float) -> None:
        super().__init__(model)
        self.teacher_weight = teacher_weight
        self._teacher = (teacher,)

    def forward(self, input_ids: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
        """Sum over the answer tokens of w KL(teacher, model) + (1 - w) cross-entropy, and how many are right."""
        teacher = self._teacher[0]
        with torch.no_grad():
            taught = answer_states(teacher, input_ids, answers)
        hidden, targets = answer_states(self.model, input_ids, answers), input_ids[:, 1:][answers[:, 1:]]
        weight, teacher_head = self.model.get_output_embeddings().weight, teacher.get_output_embeddings().weight
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight, taught, teacher_head = (x.to(dtype) for x in (hidden, weight, taught, teacher_head))
        with torch.autocast(hidden.device.type, enabled=False):
            loss, right = _LinearDistillation.apply(hidden, weight, targets, taught, teacher_head, self.teacher_weight)
        return loss, right


class _LinearDistillation(torch.autograd.Function):
    """As traformer.models.loss: rows go through both heads in chunks, so that [tokens, vocabulary] is never held."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, taught: Tensor, teacher_head: Tensor, share: float
    ) -> tuple[Tensor, Tensor]:
        rows, vocabulary = hidden.shape[0], weight.shape[0]
        size = chunk_rows(rows, 2 * vocabulary)
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        right = torch.zeros((), dtype=torch.int64, device=hidden.device)
        for start in range(0, rows, size):
            part = slice(start, min(start + size, rows))
            ours = F.linear(hidden[part], weight).to(wide).log_softmax(-1)  # [n, V]
            theirs = F.linear(taught[part], teacher_head).to(wide).log_softmax(-1)
            target = targets[part, None]
            right += (ours.argmax(-1, keepdim=True) == target).sum()
            wanted = theirs.exp()
            loss += share * (wanted * (theirs - ours)).sum() - (1 - share) * ours.gather(1, target).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            # d loss / d logits = softmax - (w teacher + (1 - w) one at the target)
            gradient = ours.exp_().sub_(wanted, alpha=share)
            if share < 1:
                gradient.scatter_add_(1, target, torch.full_like(target, share - 1, dtype=wide))
            gradient = gradient.to(hidden.dtype)
            add_gradients(gradient, hidden, weight, part, grad_hidden, grad_weight)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(right)
        return loss, right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return *scaled_gradients(ctx, grad_loss), None, None, None, None
