"""Accelerate's YAML files, which hold a few DeepSpeed keys under names of their own, as a DeepSpeed config."""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onefold.config.errors import ConfigError
from onefold.config.keys import Key, spellings
from onefold.config.text import read_source
from onefold.config.values import as_number, is_absent, read_as, wrong
from onefold.config.zero import ZeroOptimization

_MARKS = ("deepspeed_config", "compute_environment", "distributed_type")
# Tutorials print the inside of deepspeed_config alone; these names are nobody else's.
_INNER_MARKS = ("zero_stage", "offload_optimizer_device", "offload_param_device")

# Keys that start processes, with the value that says nothing. `onefold launch` and torchrun have arguments for them.
_LAUNCHER: dict[str, Any] = {
    "num_processes": None,
    "num_machines": 1,
    "machine_rank": 0,
    "main_process_ip": None,
    "main_process_port": None,
    "main_training_function": "main",
    "rdzv_backend": "static",
    "rdzv_endpoint": None,
    "same_network": True,
    "gpu_ids": "all",
    "use_cpu": False,
    "debug": False,
    "enable_cpu_affinity": False,
    "downcast_bf16": False,
    "dynamo_backend": "NO",
    "dynamo_config": {},
    "mpirun_config": {},
    "ipex_config": {},
    "command_file": None,
    "commands": None,
    "tpu_env": [],
    "tpu_name": None,
    "tpu_zone": None,
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
}
_DEEPSPEED_LAUNCHER: dict[str, Any] = {
    "deepspeed_multinode_launcher": "standard",
    "deepspeed_hostfile": None,
    "deepspeed_exclusion_filter": None,
    "deepspeed_inclusion_filter": None,
}
_OTHER_TRAINERS = ("fsdp_config", "megatron_lm_config", "fp8_config", "parallelism_config", "aws_config")
# Accelerate's name to the path in DeepSpeed's schema.
_RENAMED = {
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "train_batch_size": "train_batch_size",
    "train_micro_batch_size_per_gpu": "train_micro_batch_size_per_gpu",
}
_OWN = ("deepspeed_config_file", "deepspeed_moe_layer_cls_names", "zero3_init_flag")
_TOP = (*_MARKS, "mixed_precision", *_RENAMED, *_LAUNCHER, *_OTHER_TRAINERS)


@dataclass
class Translation:
    """A DeepSpeed config, and what there is to say about the keys that are not part of it."""

    document: dict[str, Any] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def put(self, path: str, value: Any, source: str) -> None:
        """Sets the key at a dotted path, unless another key, or the file that the YAML names, says otherwise."""
        *sections, name = path.split(".")
        inner = self.document
        for section in sections:
            if is_absent(inner.get(section)):
                inner[section] = {}
            inner = inner[section]
            if not isinstance(inner, dict):
                raise wrong(f"{section} in deepspeed_config_file", inner, "an object")
        has = inner.get(name)
        if not is_absent(has) and as_number(has) != as_number(value):
            raise ConfigError(f"{source} = {value!r}, but {path} is already {has!r}; keep one of them")
        inner[name] = value


def is_accelerate(document: Mapping[str, Any]) -> bool:
    """Whether this is Accelerate's schema rather than DeepSpeed's."""
    return any(mark in document for mark in (*_MARKS, *_INNER_MARKS))


def translate(document: Mapping[str, Any], folder: str | None = None) -> Translation:
    """Accelerate's keys in DeepSpeed's schema. `folder` is where a relative `deepspeed_config_file` may lie."""
    inner = document.get("deepspeed_config")
    inner = {} if inner is None else inner
    if not isinstance(inner, Mapping):
        raise wrong("deepspeed_config", inner, "an object of keys and values")
    result = Translation()
    if not is_absent(inner.get("deepspeed_config_file")):
        path = "deepspeed_config.deepspeed_config_file"
        result.document = _named_file(read_as(path, inner["deepspeed_config_file"], str, Key("")), folder)
    for name, value in inner.items():
        _deepspeed_key(result, str(name), value, f"deepspeed_config.{name}")
    for name, value in document.items():
        _top_key(result, name, value)
    launcher = [
        *_speaking(inner, _DEEPSPEED_LAUNCHER, "deepspeed_config."),
        *_speaking(document, _LAUNCHER, ""),
    ]
    if launcher:
        result.notices.append(f"{', '.join(launcher)}: the launcher reads what starts processes; a config does not")
    return result


def _deepspeed_key(result: Translation, name: str, value: Any, path: str) -> None:
    if name in _RENAMED:
        if not is_absent(value):
            result.put(_RENAMED[name], value, path)
    elif name == "deepspeed_moe_layer_cls_names":
        if not is_absent(value):
            classes = value.split(",") if isinstance(value, str) else read_as(path, value, tuple[str, ...], Key(""))
            result.put("zero_optimization.leaf_module.classes", [part.strip() for part in classes], path)
    elif name == "zero3_init_flag":
        if not is_absent(value) and read_as(path, value, bool, Key("")):
            result.notices.append(f"{path} = true: the script that builds the model reads it")
    elif name in spellings(ZeroOptimization):
        # Accelerate drops these without a word; people write them because they expect them to count.
        if not is_absent(value):
            result.put(f"zero_optimization.{name}", value, path)
    elif name not in _DEEPSPEED_LAUNCHER and name not in _OWN:
        raise _unknown(path, name, (*_RENAMED, *_OWN, *_DEEPSPEED_LAUNCHER, *spellings(ZeroOptimization)))


def _top_key(result: Translation, name: str, value: Any) -> None:
    if name == "mixed_precision":
        _mixed_precision(result, value)
    elif name == "distributed_type":
        if str(value).upper() not in ("DEEPSPEED", "NO", "MULTI_GPU", "MULTI_CPU"):
            result.refusals.append(f"distributed_type = {value}: this is a config for another trainer")
    elif name in _RENAMED or name == "zero3_init_flag" or name in spellings(ZeroOptimization):
        _deepspeed_key(result, name, value, name)
    elif name in _OTHER_TRAINERS:
        if value:
            result.refusals.append(f"{name}: this section belongs to another trainer; leave it out")
    elif name not in _TOP:
        raise _unknown(name, name, _TOP)


def _mixed_precision(result: Translation, value: Any) -> None:
    # YAML 1.1 reads a bare `no` as false.
    if value is False or is_absent(value) or value == "no":
        return
    if value == "bf16":
        result.put("bf16.enabled", True, "mixed_precision")
    elif value == "fp16":
        result.put("fp16.enabled", True, "mixed_precision")
        # Accelerate asks for cast inputs together with fp16, unless the config file has its own mind.
        result.document["fp16"].setdefault("auto_cast", True)
    elif value == "fp8":
        result.refusals.append("mixed_precision = fp8: fp8 is outside onefold's scope; use bf16")
    else:
        raise wrong("mixed_precision", value, "no, fp16 or bf16")


def _named_file(name: str, folder: str | None) -> dict[str, Any]:
    """Accelerate reads the path from the working directory; beside the YAML file is where people put it."""
    beside = os.path.join(folder, name) if folder else name
    return read_source(beside if not os.path.exists(name) and os.path.exists(beside) else name)


def _speaking(keys: Mapping[str, Any], quiet: Mapping[str, Any], prefix: str) -> list[str]:
    return [
        f"{prefix}{name}"
        for name, default in quiet.items()
        if name in keys
        and not is_absent(keys[name])
        and keys[name] != default
        and keys[name] != str(default)
        and not (keys[name] == "no" and default is False)
    ]


def _unknown(path: str, name: str, known: tuple[str, ...]) -> ConfigError:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"; did you mean {path.removesuffix(name)}{near[0]}?" if near else ""
    return ConfigError(f"{path}: there is no such key in an Accelerate config{hint}")
