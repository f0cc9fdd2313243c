"""Read DeepSpeed configs under DeepSpeed's name: `python configs.py FOLDER` prints the verdict on each as JSON.

FOLDER has unpacked source distributions, one folder for each package. Configs that public repositories use beyond these
are written below from what is known about them: the keys that tell them from the others.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ZERO2: dict[str, Any] = {"stage": 2, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 5e8}
ZERO3: dict[str, Any] = {
    "stage": 3,
    "overlap_comm": True,
    "sub_group_size": 1e9,
    "stage3_param_persistence_threshold": 1e5,
}
BATCH: dict[str, Any] = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8}

# Repositories that are not on the index, by the keys that their configs have beside the usual ones.
WRITTEN: dict[str, dict[str, Any]] = {
    "align-anything: inference_batch_size": BATCH | {"zero_optimization": ZERO3, "inference_batch_size": 4},
    "InternVL: log": BATCH | {"zero_optimization": ZERO2, "log": {"level": "info"}},
    "DeepSpeedExamples: cuda_visible_devices": BATCH | {"zero_optimization": ZERO2, "cuda_visible_devices": "0,1"},
    "DeepSpeedExamples: bf16 with torch_autocast": BATCH
    | {"zero_optimization": ZERO3, "bf16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "DeepSpeed-Chat: hybrid_engine disabled": BATCH
    | {"zero_optimization": ZERO3, "hybrid_engine": {"enabled": False, "max_out_tokens": 512, "inference_tp_size": 1}},
    "DeepSpeed-Chat: hybrid_engine": BATCH | {"zero_optimization": ZERO3, "hybrid_engine": {"enabled": True}},
    "FlagEmbedding: offload_optimizer at the top": BATCH
    | {"zero_optimization": ZERO2, "offload_optimizer": {"device": "cpu"}},
    "Megatron-DeepSpeed: max_grad_norm": BATCH | {"zero_optimization": ZERO2, "max_grad_norm": 1.0},
    "Megatron-DeepSpeed: data_efficiency off": BATCH
    | {"zero_optimization": ZERO2, "data_efficiency": {"enabled": False}},
    "OpenRLHF: tensor_parallel of 1, deepcompile off": BATCH
    | {
        "zero_optimization": ZERO3 | {"sub_group_size": "auto", "round_robin_gradients": True},
        "tensor_parallel": {"autotp_size": 1}, "compile": {"deepcompile": False},
        "checkpoint": {"load_universal": False}, "data_types": {"grad_accum_dtype": None},
    },
    "OpenRLHF: Muon": BATCH | {"zero_optimization": ZERO3, "optimizer": {"type": "Muon", "params": {"lr": 1e-3}}},
    "TRL: dotted keys": BATCH | {"zero_optimization": ZERO3, "zero_optimization.reduce_bucket_size": 1024},
    "DeepSpeed 0.19.8: keep_in_fp32_modules": BATCH
    | {"zero_optimization": ZERO3, "data_types": {"grad_accum_dtype": "fp32", "keep_in_fp32_modules": ["norm"]}},
    "DeepSpeed 0.19.8: disable_python_gc": BATCH | {"zero_optimization": ZERO3, "disable_python_gc": True},
    "DeepSpeed 0.19.8: compute_grad_norm": BATCH | {"zero_optimization": ZERO3 | {"compute_grad_norm": True}},
    "DeepSpeed 0.19.8: parameter_alignment": BATCH | {"zero_optimization": ZERO3 | {"parameter_alignment": True}},
    "a comment: _comment": BATCH | {"_comment": "from our wiki", "zero_optimization": ZERO2},
    "a comment: //": BATCH | {"//": "from our wiki", "zero_optimization": ZERO2},
    "ArcticTraining: sequence_parallel_size": BATCH | {"zero_optimization": ZERO3, "sequence_parallel_size": 2},
    "DeepSpeed: elasticity": BATCH
    | {
        "zero_optimization": ZERO2,
        "elasticity": {
            "enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [1, 2], "min_gpus": 1, "min_time": 20,
            "ignore_non_elastic_batch_info": True,
        },
    },
    "DeepSpeed: deepcompile": BATCH | {"zero_optimization": ZERO3, "compile": {"deepcompile": True}},
    "DeepSpeed: zenflow": BATCH
    | {"zero_optimization": ZERO2 | {"offload_optimizer": {"device": "cpu"}, "zenflow": {"topk_ratio": 0.1}}},
    "DeepSpeed: OneBitAdam": BATCH | {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}},
    "DeepSpeed: ZeRO++": BATCH
    | {
        "zero_optimization": ZERO3
        | {"zero_hpz_partition_size": 1, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    },
    "public: number_checkpoints false": BATCH
    | {
        "zero_optimization": ZERO2,
        "activation_checkpointing": {"partition_activations": False, "number_checkpoints": False, "profile": False},
    },
    "public: last_batch_iteration of a schedule": BATCH
    | {
        "zero_optimization": ZERO2,
        "scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": -1, "warmup_num_steps": 10}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True, "adam_w_mode": True}},
    },
    "public: amp disabled": BATCH | {"zero_optimization": ZERO2, "amp": {"enabled": False, "opt_level": "O1"}},
    "public: sparse_attention": BATCH
    | {"zero_optimization": ZERO2, "sparse_attention": {"mode": "fixed", "block": 16}},
    "public: tensor_parallel of 8": BATCH | {"zero_optimization": ZERO3, "tensor_parallel": {"tp_size": 8}},
    "public: pipeline": BATCH | {"zero_optimization": {"stage": 1}, "pipeline": {"pipe_parallel_size": 2}},
    "public: fp16 auto_cast auto": BATCH
    | {"zero_optimization": ZERO3, "fp16": {"enabled": False, "auto_cast": "auto", "initial_scale_power": 32}},
    "public: stage3_module_granularity_threshold": BATCH
    | {"zero_optimization": ZERO3 | {"stage3_module_granularity_threshold": 1175567}},
    "public: memory_efficient_linear": BATCH | {"zero_optimization": ZERO3 | {"memory_efficient_linear": False}},
    "public: zero_quantized_nontrainable_weights": BATCH
    | {"zero_optimization": ZERO3 | {"zero_quantized_nontrainable_weights": True}},
    "DeepSpeed: NVMe": BATCH
    | {
        "zero_optimization": ZERO3
        | {
            "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp", "buffer_count": 4, "fast_init": False},
            "offload_param": {"device": "nvme", "nvme_path": "/tmp", "buffer_size": 1e8, "max_in_cpu": 1e9},
        },
        "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "overlap_events": True},
    },
}  # fmt: skip


# An error is the right answer: DeepSpeed refuses these too, or ignores a key that is in the wrong place.
WRONG = {
    "zero1_torch_compile.json": "DeepSpeed refuses it too",
    "zero2_torch_compile.json": "DeepSpeed refuses it too",
    "FlagEmbedding: offload_optimizer at the top": "DeepSpeed ignores the misplaced key",
}


def read(name: str, config: dict[str, Any]) -> str:
    """Return what becomes of a config. "auto" stands where the Trainer writes a number."""
    from deepspeed.runtime.config import DeepSpeedConfig

    filled = {key: value for key, value in config.items() if value != "auto"}
    inner = filled.get("deepspeed_config", filled)
    if not any(key.startswith("train_") for key in inner):
        inner["train_micro_batch_size_per_gpu"] = 1
    try:
        refusals = DeepSpeedConfig(filled).settings.refusals
    except Exception as error:
        text, reason = " ".join(f"{error}".split()), WRONG.get(name.rpartition("/")[2])
        return f"refused ({reason}): {text}" if reason else f"error: {text}"
    return f"refused: {'; '.join(refusals)}" if refusals else "taken"


def shipped(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the configs of source distributions: JSON files, and the configs of accelerate."""
    import yaml

    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".yaml", ".yml")):
        text = path.read_text(errors="replace")
        name = "/".join(path.relative_to(folder).parts[1:])
        if path.suffix == ".json" and '"zero_optimization"' in text:
            found[name] = json.loads(text)
        elif path.suffix != ".json" and "\ndeepspeed_config:" in f"\n{text}":
            found[name] = yaml.safe_load(text)
    return found


def main() -> None:
    configs = shipped(Path(sys.argv[1])) | WRITTEN
    print(json.dumps({name: read(name, config) for name, config in configs.items()}))


if __name__ == "__main__":
    main()
