"""Configs of published models by name, as their config.json has them. No torch, and nothing is downloaded."""

from __future__ import annotations

import re
from typing import Any

# Names of publishers before a slash.
_PUBLISHERS = r"(meta-llama|qwen|mistralai|google|openai|openai-community|microsoft|deepseek-ai)/"
# Endings of the names of variants with the same config, by the beginning of a key of `MODELS`. Others are not known:
# Mistral-7B-v0.3 has a larger vocabulary, and Phi-3-mini-128k-instruct has more positions.
_VARIANTS = {
    "llama-": "instruct", "qwen2.5-": "instruct", "gemma-2-": "it", "phi-3-mini": "4k-instruct", "deepseek-v3": "base",
    "mistral-7b": r"(instruct-)?v0\.2", "mixtral-8x7b": r"(instruct-)?v0\.1", "mixtral-8x22b": r"v0\.1",
}  # fmt: skip

_KEYS = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "ffn": "intermediate_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "vocabulary": "vocab_size", "positions": "max_position_embeddings",
}  # fmt: skip


def _config(model_type: str, architecture: str, *, tied: bool = False, **shape: Any) -> dict[str, Any]:
    renamed = {_KEYS.get(name, name): value for name, value in shape.items()}
    return {"model_type": model_type, "architectures": [architecture], "tie_word_embeddings": tied, **renamed}


def _llama(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    shape = {"layers": layers, "hidden": hidden, "ffn": ffn, "heads": heads, "kv_heads": kv_heads}
    return _config("llama", "LlamaForCausalLM", **{**shape, "vocabulary": 128256, "positions": 131072, **more})


def _qwen2(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    shape = {"layers": layers, "hidden": hidden, "ffn": ffn, "heads": heads, "kv_heads": kv_heads}
    return _config("qwen2", "Qwen2ForCausalLM", **{**shape, "vocabulary": 152064, "positions": 32768, **more})


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int = 8, **more: Any) -> dict[str, Any]:
    shape = {"layers": layers, "hidden": hidden, "ffn": ffn, "heads": heads, "kv_heads": kv_heads, "head_dim": 128}
    return _config("qwen3", "Qwen3ForCausalLM", **{**shape, "vocabulary": 151936, "positions": 40960, **more})


def _qwen3_moe(layers: int, hidden: int, expert: int, heads: int, ffn: int) -> dict[str, Any]:
    return _config(
        "qwen3_moe", "Qwen3MoeForCausalLM", layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=4,
        head_dim=128, vocabulary=151936, positions=40960, moe_intermediate_size=expert, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True,
    )  # fmt: skip


def _mistral(kind: str, layers: int, hidden: int, ffn: int, heads: int, **more: Any) -> dict[str, Any]:
    architecture = {"mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM"}[kind]
    shape = {"layers": layers, "hidden": hidden, "ffn": ffn, "heads": heads, "kv_heads": 8, "positions": 32768}
    return _config(kind, architecture, **{**shape, "sliding_window": None, **more})


def _gemma2(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return _config(
        "gemma2", "Gemma2ForCausalLM", layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, vocabulary=256000, positions=8192, sliding_window=4096, tied=True,
    )  # fmt: skip


def _gpt2(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return _config(
        "gpt2", "GPT2LMHeadModel", n_layer=layers, n_embd=hidden, n_head=heads, n_positions=1024, vocabulary=50257,
        tied=True,
    )  # fmt: skip


def _phi3(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocabulary: int, positions: int) -> Any:
    return _config(
        "phi3", "Phi3ForCausalLM", layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads,
        vocabulary=vocabulary, positions=positions, pad_token_id=0,
    )  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return _config(
        "gpt_oss", "GptOssForCausalLM", layers=layers, hidden=2880, ffn=2880, heads=64, kv_heads=8, head_dim=64,
        vocabulary=201088, positions=131072, sliding_window=128, num_local_experts=experts, num_experts_per_tok=4,
    )  # fmt: skip


MODELS: dict[str, dict[str, Any]] = {
    "llama-3.2-3b": _llama(28, 3072, 8192, 24, 8, tied=True),
    "llama-3-70b": _llama(80, 8192, 28672, 64, 8, positions=8192),
    "llama-3.1-8b": _llama(32, 4096, 14336, 32, 8),
    "llama-3.1-70b": _llama(80, 8192, 28672, 64, 8),
    "llama-3.1-405b": _llama(126, 16384, 53248, 128, 8),
    "llama-3.3-70b": _llama(80, 8192, 28672, 64, 8),
    "qwen2.5-0.5b": _qwen2(24, 896, 4864, 14, 2, vocabulary=151936, tied=True),
    "qwen2.5-1.5b": _qwen2(28, 1536, 8960, 12, 2, vocabulary=151936, tied=True),
    "qwen2.5-3b": _qwen2(36, 2048, 11008, 16, 2, vocabulary=151936, tied=True),
    "qwen2.5-7b": _qwen2(28, 3584, 18944, 28, 4),
    "qwen2.5-14b": _qwen2(48, 5120, 13824, 40, 8),
    "qwen2.5-32b": _qwen2(64, 5120, 27648, 40, 8),
    "qwen2.5-72b": _qwen2(80, 8192, 29568, 64, 8),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 768, 32, 6144),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 1536, 64, 12288),
    "mistral-7b": _mistral("mistral", 32, 4096, 14336, 32, vocabulary=32000),
    "mixtral-8x7b": _mistral("mixtral", 32, 4096, 14336, 32, vocabulary=32000, num_local_experts=8),
    "mixtral-8x22b": _mistral("mixtral", 56, 6144, 16384, 48, vocabulary=32000, positions=65536, num_local_experts=8),
    "gemma-2-2b": _gemma2(26, 2304, 9216, 8, 4, 256),
    "gemma-2-9b": _gemma2(42, 3584, 14336, 16, 8, 256),
    "gemma-2-27b": _gemma2(46, 4608, 36864, 32, 16, 128),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "phi-2": _config("phi", "PhiForCausalLM", layers=32, hidden=2560, ffn=10240, heads=32, vocabulary=51200,
                     positions=2048, partial_rotary_factor=0.4),
    "phi-3-mini": _phi3(32, 3072, 8192, 32, 32, 32064, 4096),
    "phi-4": _phi3(40, 5120, 17920, 40, 10, 100352, 16384),
    "deepseek-v3": _config(
        "deepseek_v3", "DeepseekV3ForCausalLM", layers=61, hidden=7168, ffn=18432, heads=128, kv_heads=128,
        vocabulary=129280, positions=163840, moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1,
        num_experts_per_tok=8, first_k_dense_replace=3, q_lora_rank=1536, kv_lora_rank=512, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128, n_group=8, topk_group=4,
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}  # fmt: skip
"""DeepSeek-V3 has no multi-token prediction layer here, as in transformers."""


def known_model(text: str) -> str | None:
    """Return the key of `MODELS` for a name such as Qwen/Qwen2.5-7B-Instruct or mistral-7b."""
    name = re.sub(rf"^{_PUBLISHERS}", "", re.sub(r"[ _]+", "-", text.strip().lower()))
    name = re.sub(r"^(meta-)?llama-?(?=3)", "llama-", name)
    for beginning, ending in _VARIANTS.items():
        base = re.sub(f"-{ending}$", "", name)
        if base.startswith(beginning) and base in MODELS:
            return base
    return name if name in MODELS else None
