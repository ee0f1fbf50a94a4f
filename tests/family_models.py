"""Tiny random targets of many families, made from transformers' own classes and saved as folders."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

import draftline
from builders import word_tokenizer

TINY_TARGET = Path(draftline.__file__).parent / "assets" / "tiny_target"
VOCABULARY = 40  # the word tokenizer has 19 words: the rest is padding
DEPTH = 4
IDS = {"eos_token_id": 3, "pad_token_id": 1, "bos_token_id": None}
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": DEPTH,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, **IDS,
}  # fmt: skip
WIDE = BASE | {"head_dim": 24}  # heads that are not hidden / heads wide
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 7000.0}}
HALF_ROPE = {"rope_parameters": ROPE["rope_parameters"] | {"partial_rotary_factor": 0.5}}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
SLIDING = {"sliding_window": 8}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 9000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * (DEPTH // 2)}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * (DEPTH // 2), "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, **HALF_ROPE,
}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 7000.0, "mrope_section": [2, 3, 3]}}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 7000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def qwen2_5_vl() -> Any:
    text = BASE | MROPE
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    places = {"image_token_id": 36, "video_token_id": 37, "vision_start_token_id": 38, "vision_end_token_id": 39}
    return hf.Qwen2_5_VLForConditionalGeneration(
        hf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **places)
    )


def qwen3_vl() -> Any:
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
        "deepstack_visual_indexes": [0],
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 7000.0, "mrope_section": [4, 4, 4], "mrope_interleaved": True}
    places = {"image_token_id": 36, "video_token_id": 37, "vision_start_token_id": 38, "vision_end_token_id": 39}
    text = WIDE | {"rope_parameters": rope}
    return hf.Qwen3VLForConditionalGeneration(hf.Qwen3VLConfig(text_config=text, vision_config=vision, **places))


def gemma3_vision() -> Any:
    text = WIDE | SLIDING | MIXED | {"rope_parameters": GEMMA_ROPE}
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    places = {"image_token_index": 36, "boi_token_index": 37, "eoi_token_index": 38, "mm_tokens_per_image": 4}
    return hf.Gemma3ForConditionalGeneration(hf.Gemma3Config(text_config=text, vision_config=vision, **places))


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**BASE, rope_parameters=LLAMA3_ROPE)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**(BASE | ROPE | {"vocab_size": 1700}))),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**WIDE, **ROPE, tie_word_embeddings=True)),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**WIDE, **ROPE, **EXPERTS)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**BASE, **ROPE, **SLIDING)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**WIDE, **ROPE, **SLIDING, **MIXED, final_logit_softcapping=4.0, attn_logit_softcapping=2.0)
    ),
    "gemma3_text": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**WIDE, **SLIDING, **MIXED, rope_parameters=GEMMA_ROPE, final_logit_softcapping=5.0)
    ),
    "gemma3": gemma3_vision,
    "qwen2_5_vl": qwen2_5_vl,
    "phi": lambda: hf.PhiForCausalLM(
        hf.PhiConfig(
            **BASE, rope_parameters={"rope_type": "default", "rope_theta": 7000.0, "partial_rotary_factor": 0.5}
        )
    ),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**BASE, **HALF_ROPE)),
    "granite": lambda: hf.GraniteForCausalLM(
        hf.GraniteConfig(**BASE, **ROPE, embedding_multiplier=6.0, logits_scaling=3.0, residual_multiplier=0.7)
    ),
    "cohere": lambda: hf.CohereForCausalLM(hf.CohereConfig(**BASE, **ROPE, logit_scale=0.3)),
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**WIDE, **SLIDING, **MIXED, **ROPE, num_local_experts=4, num_experts_per_tok=2)
    ),
    "qwen3_next": lambda: hf.Qwen3NextForCausalLM(
        hf.Qwen3NextConfig(**WIDE, **LINEAR, **EXPERTS, shared_expert_intermediate_size=32)
    ),
    "qwen3_5_text": lambda: hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**WIDE, **LINEAR)),
}

# Families beside those of the issue, which go through a run of their own and nothing more.
OTHERS: dict[str, Callable[[], Any]] = {
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**WIDE, **ROPE)),
    "gemma4_text": lambda: hf.Gemma4ForCausalLM(
        hf.Gemma4TextConfig(
            **WIDE,
            **SLIDING,
            **MIXED,
            global_head_dim=24,
            vocab_size_per_layer_input=40,
            hidden_size_per_layer_input=0,
            num_kv_shared_layers=0,
        )  # fmt: skip
    ),
    "llama4_text": lambda: hf.Llama4ForCausalLM(
        hf.Llama4TextConfig(**WIDE, **ROPE, num_local_experts=2, intermediate_size_mlp=96, attention_chunk_size=8)
    ),
    "olmo3": lambda: hf.Olmo3ForCausalLM(hf.Olmo3Config(**BASE, **SLIDING)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**BASE, **ROPE, num_local_experts=4)),
    "glm4_moe": lambda: hf.Glm4MoeForCausalLM(
        hf.Glm4MoeConfig(
            **WIDE,
            **HALF_ROPE,
            moe_intermediate_size=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
        )  # fmt: skip
    ),
    "deepseek_v3": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            **(BASE | ROPE | {"num_key_value_heads": 4}),
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=16,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
        )  # fmt: skip
    ),
    "qwen3_vl": qwen3_vl,
    "lfm2": lambda: hf.Lfm2ForCausalLM(hf.Lfm2Config(**BASE, **ROPE, full_attn_idxs=[1, 3])),
    "falcon_h1": lambda: hf.FalconH1ForCausalLM(
        hf.FalconH1Config(
            **WIDE,
            **ROPE,
            mamba_d_ssm=64,
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_d_state=16,
            mamba_n_groups=1,
            lm_head_multiplier=0.5,
            embedding_multiplier=3.0,
        )  # fmt: skip
    ),
}


def save_family(name: str, folder: Path, seed: int = 0) -> Path:
    """A random target of the family, wide enough in its weights that its greedy text is not one repeated token."""
    torch.manual_seed(seed)
    model = (FAMILIES | OTHERS)[name]()
    for key, weight in model.named_parameters():
        if weight.dim() >= 2:
            weight.data.normal_(0, 0.5 if "embed" in key else 0.2)
        elif key.endswith("bias"):
            weight.data.normal_(0, 0.3)
        elif "feedforward_layernorm" in key or "post_attention_layernorm" in key:
            weight.data.uniform_(2, 8)  # Gemma's layers add little to its scaled embedding otherwise
    model.save_pretrained(folder)
    if name == "qwen2":  # transformers reads any tokenizer.json beside a qwen2 config as a byte-level one
        for file in TINY_TARGET.glob("*token*"):
            shutil.copy(file, folder)
        shutil.copy(TINY_TARGET / "chat_template.jinja", folder)
    else:
        word_tokenizer().save_pretrained(folder)
    return folder
