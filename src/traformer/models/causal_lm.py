"""The language model: trunk, output head, loss, generation."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from traformer.models.config import TraformerConfig
from traformer.models.decoder import TraformerModel, TraformerPreTrainedModel
from traformer.models.exploring import ExploredModel
from traformer.models.generation import CheckedGenerationMixin


class TraformerForCausalLM(TraformerPreTrainedModel, CheckedGenerationMixin, ExploredModel):
    """A decoder that predicts the next token."""

    def __init__(self, config: TraformerConfig) -> None:
        super().__init__(config)
        self.model = TraformerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """input_ids [B, T] (or inputs_embeds [B, T, E]) -> logits [B, T, vocabulary], loss if there are labels.

        attention_mask   [B, past + T], 1 = a real token; padding may be on either side and changes nothing
        position_ids     [B, T]; ids that start over within a row of batch 1 mean packed sequences
        cu_seqlens       [n + 1] where packed sequences start and end, batch 1 (also as cu_seq_lens_q)
        labels           [B, T]; token t is predicted from position t - 1, -100 is not scored
        logits_to_keep   only the last so many logits (or those at the given indices); 0 = all
        output_attentions  one [B, H, T, past + T] per layer, None for a layer that weighs no keys (and None altogether
                         if no layer does). They are computed beside the output: a loss on them has a gradient, but the
                         loss of the output has none with respect to them
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cu_seqlens=cu_seqlens,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            cu_seq_lens_q=kwargs.get("cu_seq_lens_q"),
            cu_seq_lens_k=kwargs.get("cu_seq_lens_k"),
        )
        hidden_states = outputs.last_hidden_state
        if isinstance(logits_to_keep, Tensor):
            hidden_states = hidden_states[:, logits_to_keep]
        elif logits_to_keep > 0:
            hidden_states = hidden_states[:, -logits_to_keep:]
        logits = self.lm_head(hidden_states)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        return output if return_dict or return_dict is None else output.to_tuple()
