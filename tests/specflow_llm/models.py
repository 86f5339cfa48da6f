"""Tiny random models of many architectures, wide enough apart that an equality of tokens means something.

``initializer_range=0.3``: with transformers' default of 0.02 logits are near-uniform, outputs constant, and every
parity test would pass vacuously.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 64
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral-sliding": ("MistralConfig", {"sliding_window": 12, "head_dim": 8}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "gemma": ("GemmaConfig", {"head_dim": 8}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 12, "attn_implementation": "eager"}),
    "gemma3-alternating": (
        "Gemma3TextConfig",
        {
            "head_dim": 8,
            "sliding_window": 12,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt2": ("GPT2Config", _GPT2),
    "gpt-neox": ("GPTNeoXConfig", {"num_key_value_heads": 4}),
    "mixtral-moe": ("MixtralConfig", {"num_local_experts": 4, **_MOE}),
    "qwen3-moe": ("Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8, **_MOE}),
    "phi": ("PhiConfig", {"num_key_value_heads": 4}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "olmo2": ("Olmo2Config", {}),
    "stablelm": ("StableLmConfig", {}),
    "starcoder2": ("Starcoder2Config", {}),
    "granite": ("GraniteConfig", {}),
    "cohere": ("CohereConfig", {}),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3, "do_layer_norm_before": True}),
    "falcon-rotary": ("FalconConfig", {"alibi": False, "new_decoder_architecture": False, "multi_query": True}),
}

RECURRENT_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": (
        "Mamba2Config",
        {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 8, "expand": 2},
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            "head_dim": 8,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            **_MOE,
        },
    ),
}

_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 24, **_MOE}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    **_MOE,
}
_SCAN: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}

MORE_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    # Attention with a turn of its own.
    "gptj": ("GPTJConfig", {**_GPT2, "rotary_dim": 8}),
    "llama4-chunked": (
        "Llama4TextConfig",
        {**_EXPERTS, "head_dim": 8, "intermediate_size_mlp": 48, "attention_chunk_size": 6, "num_hidden_layers": 3},
    ),
    "gpt-oss-sinks": ("GptOssConfig", {**_EXPERTS, "head_dim": 8, "sliding_window": 6, "num_hidden_layers": 3}),
    "deepseek-v3-latent": ("DeepseekV3Config", _LATENT),
    "cohere2": ("Cohere2Config", {"head_dim": 8, "sliding_window": 6, "num_hidden_layers": 4}),
    "smollm3-some-rotary": ("SmolLM3Config", {"num_hidden_layers": 4}),
    "gemma3n-shared-kv": (
        "Gemma3nTextConfig",
        {
            "head_dim": 8,
            "sliding_window": 6,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "intermediate_size": [48] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    # Recurrent and hybrid.
    "mamba": ("MambaConfig", {"state_size": 8}),
    "lfm2-conv": (
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "num_hidden_layers": 3},
    ),
    "falcon-h1-parallel": ("FalconH1Config", {**_SCAN, "mamba_d_ssm": 64, "head_dim": 8}),
    "granite-hybrid": (
        "GraniteMoeHybridConfig",
        {**_EXPERTS, **_SCAN, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 24},
    ),
}
"""Families that differ from all of the above in how they attend or what they keep."""


SEEDS: dict[str, int] = {
    "llama": 5,
    "mistral-sliding": 3,
    "qwen2": 0,
    "qwen3": 3,
    "gemma": 3,
    "gemma2": 2,
    "gemma3-alternating": 3,
    "gpt2": 4,
    "gpt-neox": 0,
    "mixtral-moe": 0,
    "qwen3-moe": 2,
    "phi": 5,
    "phi3": 3,
    "olmo2": 5,
    "stablelm": 0,
    "starcoder2": 3,
    "granite": 3,
    "cohere": 5,
    "opt": 4,
    "falcon-rotary": 2,
    "mamba2": 2,
    "qwen3-next": 2,
}
"""Seeds whose greedy output from the prompt [1, 2, 3] has at least 14 distinct tokens in 60."""


def tiny_config(name: str, **overrides: Any) -> Any:
    """The configuration of a tiny model."""
    class_name, fields = {**CONFIGS, **RECURRENT_CONFIGS, **MORE_CONFIGS}[name]
    base = {} if name in {"gpt2", "gptj"} else _COMMON
    return getattr(transformers, class_name)(**{**base, **fields, **overrides})


@functools.cache
def _built(name: str, seed: int, overrides: tuple[tuple[str, Any], ...]) -> PreTrainedModel:
    config = tiny_config(name, **dict(overrides))
    torch.manual_seed(seed)
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # some families ignore initializer_range for some weights
            if parameter.dim() > 1 and float(parameter.std()) < 0.1:
                parameter.normal_(0.0, 0.3)
    return model.eval()


def tiny_model(name: str = "llama", *, seed: int | None = None, **overrides: Any) -> PreTrainedModel:
    """A tiny random model in float32; the same object for the same arguments, so do not change it."""
    return _built(name, SEEDS.get(name, 0) if seed is None else seed, tuple(sorted(overrides.items())))


def near_copy(model: PreTrainedModel, *, noise: float = 0.3, seed: int = 1) -> PreTrainedModel:
    """A copy whose weights are perturbed by ``noise`` standard deviations: often, not always, right."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.dim() > 1:
                parameter.add_(noise * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return twin


@functools.cache
def near_model() -> PreTrainedModel:
    """A model that often agrees with the tiny target; not to be changed."""
    return near_copy(tiny_model())


def generate(model: PreTrainedModel, prompt: list[int], max_new_tokens: int, **kwargs: Any) -> list[int]:
    """Greedy ``transformers`` generation, output ids only."""
    ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=0,
        **kwargs,
    )
    result: list[int] = output[0, len(prompt) :].tolist()
    return result
