"""Models nobody thought of: each oddity breaks one thing that drafting takes for granted."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3Model


class OddConfig(Qwen3Config):
    model_type = "odd"
    oddity = ""


class DeltaLayer(Qwen3DecoderLayer):
    """Gives what it adds to the residual stream; the model keeps the stream."""

    def forward(self, hidden_states, **others):
        return super().forward(hidden_states, **others) - hidden_states


class OddModel(Qwen3Model):
    config_class = OddConfig

    def __init__(self, config):
        super().__init__(config)
        if config.oddity == "deltas":
            self.layers = nn.ModuleList(DeltaLayer(config, i) for i in range(config.num_hidden_layers))
        self.way_in = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, inputs_embeds=None, **others):
        embeds = self.embed_tokens(input_ids)
        if self.config.oddity == "projection":
            embeds = self.way_in(embeds)
        if self.config.oddity == "deltas":
            return self.with_stream(embeds)
        if self.config.oddity == "loop":
            embeds = super().forward(inputs_embeds=embeds, use_cache=False).last_hidden_state
        return super().forward(inputs_embeds=embeds, **others)

    def with_stream(self, stream):
        position = torch.arange(stream.shape[1])[None]
        turns = self.rotary_emb(stream, position)
        for layer in self.layers:
            stream = stream + layer(stream, position_embeddings=turns, position_ids=position)
        return type("Output", (), {"last_hidden_state": self.norm(stream)})()


class OddForCausalLM(Qwen3ForCausalLM):
    config_class = OddConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = OddModel(config)
        self.post_init()

    def forward(self, input_ids=None, logits_to_keep=0, **others):
        if self.config.oddity == "deltas":
            output = type("Output", (), {})()
            output.logits = self.lm_head(self.model(input_ids).last_hidden_state)
            return output
        output = super().forward(input_ids=input_ids, logits_to_keep=logits_to_keep, **others)
        if self.config.oddity == "two sources":
            output.logits = output.logits + self.lm_head(self.model.embed_tokens(input_ids))[:, -logits_to_keep:]
        if self.config.oddity == "hidden scale":
            output.logits = 0.5 * output.logits
        if self.config.oddity == "forgetful" and others.get("use_cache") and input_ids.shape[1] > 1:
            output.logits = output.logits.roll(1, -1)
        return output


AutoConfig.register("odd", OddConfig)
AutoModelForCausalLM.register(OddConfig, OddForCausalLM)
