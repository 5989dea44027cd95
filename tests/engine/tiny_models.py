"""Tiny random models of many families, and a plain reference for what they should answer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB_SIZE = 300

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    # A multiple of 16: what is left over of a processor's vector is rounded differently.
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}

CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**COMMON),
    "qwen2": lambda: Qwen2Config(**COMMON),
    "qwen3": lambda: Qwen3Config(**COMMON, head_dim=16),
    "gemma2": lambda: Gemma2Config(
        **COMMON,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=8,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **COMMON,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "mistral with a window": lambda: MistralConfig(**COMMON, head_dim=8, sliding_window=8),
    "cohere2": lambda: Cohere2Config(**COMMON, sliding_window=8),
    "phi3": lambda: Phi3Config(**COMMON),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=256,
        bos_token_id=1,
        eos_token_id=None,
    ),
    "gpt-neox": lambda: GPTNeoXConfig(
        **{name: value for name, value in COMMON.items() if name != "num_key_value_heads"}
    ),
    "mixtral": lambda: MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **COMMON, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "gpt-oss": lambda: GptOssConfig(
        **COMMON, head_dim=16, sliding_window=8, num_local_experts=4, num_experts_per_tok=2
    ),
}


def build(family: str) -> Any:
    """A random model in float32, the same at every call.

    Weights are larger than a fresh model's, or all answers would repeat one token.
    """
    torch.manual_seed(7)
    config = CONFIGS[family]()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.4 if "embed" in name else 0.25)
            elif "sinks" in name:
                parameter.normal_(0.0, 1.0)
    return model


def generate(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy answer by transformers' own `generate`, eager attention, batch of one."""
    model.set_attn_implementation("eager")
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer
