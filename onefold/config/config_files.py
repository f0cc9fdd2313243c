"""Parsing of config files to plain dicts: JSON with comments, YAML, base64 strings, and Accelerate's schema."""

import base64
import binascii
import difflib
import json
import os
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from onefold.config.keys import (
    Key,
    as_number,
    is_absent,
    is_comment,
    join,
    read_as,
    spellings,
    without_comments,
    wrong,
)
from onefold.config.zero_optimization import ZeroOptimization
from onefold.errors import MAX_DIGITS, ConfigError, shown

_MAX_DEPTH = 50
_MAX_BYTES = 1 << 26
_MAX_VALUES = 1_000_000
_WIDTH = 120
# Each pattern consumes what it has scanned, so that the time is linear in the length of the text: a string without its
# end is one up to the end of the line, and a comment without its end is one up to the end of the text.
_STRING = r'"(?:\\.|[^"\\\n])*+(?:"|\\?(?=\n|\Z))'
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*[\s\S]*?(?:\*/|\Z)")
_TRAILING_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])")
_LONG_NUMBER = re.compile(rf"{_STRING}|(?<!\d)\d++(?:_\d++)+(?:\.\d+)?(?:[eE][+-]?\d+)?")


def read_source(source: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the dict in a JSON or YAML file, or in a base64 string as DeepSpeed's launcher passes it."""
    path = Path(source).expanduser()
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)  # a limit, because a device such as /dev/zero has no end
        if len(data) > _MAX_BYTES:
            raise ConfigError(f"{path}: not a config, because it is larger than {_MAX_BYTES >> 20} MiB")
        text = data.decode("utf-8-sig").replace("\r\n", "\n")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file ({error})") from error
    except OSError as error:
        decoded = _decode(source) if isinstance(source, str) else None
        if decoded is not None:
            return parse_json(decoded, "base64 config")
        if isinstance(source, str) and source.lstrip().startswith("{"):
            raise ConfigError(
                "the config is JSON text; pass the path of a file, or the result of json.loads"
            ) from error
        raise ConfigError(f"{path}: the config cannot be read ({error.strerror or error})") from error
    if path.suffix.lower() in (".yaml", ".yml"):
        return parse_yaml(text, str(path))
    return parse_json(text, str(path))


def parse_json(text: str, name: str) -> dict[str, Any]:
    """Parse JSON with `//`, `/* */` and `#` comments, trailing commas and numbers such as 500_000_000."""
    # Each replacement keeps the length of the text, so that the line and column of an error remain correct.
    plain = _COMMENT.sub(lambda match: match[0] if match[0][0] == '"' else re.sub(r"[^\n]", " ", match[0]), text)
    plain = _TRAILING_COMMA.sub(lambda match: " " if match[0] == "," else match[0], plain)
    plain = _LONG_NUMBER.sub(
        lambda match: match[0] if match[0][0] == '"' else match[0].replace("_", "").ljust(len(match[0])), plain
    )

    def whole(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            before = plain[: plain.index(digits)]
            line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
            raise _at(name, text, line, column, f"a number of {len(digits)} digits")
        return int(digits)

    try:
        parsed = json.loads(plain, object_pairs_hook=_Pairs, parse_int=whole)
    except json.JSONDecodeError as error:
        raise _at(name, text, error.lineno, error.colno, error.msg) from error
    except RecursionError as error:
        raise _too_deep(name) from error
    check_depth(parsed, name)
    return _top(_without_duplicates(parsed, "", name), name)


def parse_yaml(text: str, name: str) -> dict[str, Any]:
    """Parse one YAML document without duplicate keys."""
    try:
        parsed = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark or error.context_mark) is not None:
            raise _at(name, text, mark.line + 1, mark.column + 1, error.problem or "not YAML") from error
        raise ConfigError(f"{name}: {error}") from error
    except RecursionError as error:
        raise _too_deep(name) from error
    check_depth(parsed, name)
    return _top(parsed, name)


def check_depth(document: Any, name: str) -> None:
    """Raise if a document is nested too deeply. A YAML alias inside itself is infinitely deep."""
    level = [document]
    for _ in range(_MAX_DEPTH):
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            return
        if len(level) > _MAX_VALUES:
            break
    raise _too_deep(name)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, _Pairs):
        return [inner for _, inner in value]
    return value if isinstance(value, list | tuple) else ()


def _too_deep(name: str) -> ConfigError:
    return ConfigError(
        f"{name}: not a config, because it has more than {_MAX_DEPTH} levels, or more than {_MAX_VALUES} values "
        "on one level"
    )


class _Pairs(list[tuple[str, Any]]):
    """A JSON object before its keys are checked."""


class _Loader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys.

    Numbers are decimal, as in YAML 1.2; version 1.1 reads 010 as 8 and 1:30 as 90. Such values, and dates, remain
    strings, which are converted or rejected by the type of their key.
    """

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        text = self.construct_scalar(node)
        if len(text) > MAX_DIGITS:
            raise yaml.MarkedYAMLError(problem=f"a number of {len(text)} characters", problem_mark=node.start_mark)
        return as_number(text)

    def construct_text(self, node: yaml.ScalarNode) -> Any:
        return self.construct_scalar(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for name, _ in node.value:
            if isinstance(name, yaml.ScalarNode):
                if name.value in seen and not is_comment(name.value):
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {name.value!r} is given twice", problem_mark=name.start_mark
                    )
                seen.add(name.value)
        return super().construct_mapping(node, deep)


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_number)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_text)


def _without_duplicates(value: Any, path: str, name: str) -> Any:
    if isinstance(value, _Pairs):
        found: dict[str, Any] = {}
        for key, inner in value:
            full = join(path, key)
            if key in found and not is_comment(key):
                raise ConfigError(f"{name}: the key {full} is given twice. Keep one of them.")
            found[key] = _without_duplicates(inner, full, name)
        return found
    if isinstance(value, list):
        return [_without_duplicates(inner, path, name) for inner in value]
    return value


def _top(parsed: Any, name: str) -> dict[str, Any]:
    if not isinstance(parsed, Mapping):
        raise ConfigError(f"{name}: expected an object of keys and values, not {shown(parsed)}")
    return {str(key): value for key, value in without_comments(parsed).items()}


def _at(name: str, text: str, line: int, column: int, problem: str) -> ConfigError:
    lines, start = text.splitlines(), max(0, column - 1 - _WIDTH // 2)
    there = lines[line - 1][start : start + _WIDTH] if 0 < line <= len(lines) else ""
    pointer = " " * (column - 1 - start) + "^"
    return ConfigError(f"{name}, line {line}, column {column}: {problem}\n    {there}\n    {pointer}")


def _decode(text: str) -> str | None:
    try:
        decoded = base64.urlsafe_b64decode(text.encode("ascii")).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


# -- Accelerate's YAML files, which contain a few DeepSpeed keys under different names --------------------------------

_MARKS = ("deepspeed_config", "compute_environment", "distributed_type")
# Tutorials show the content of deepspeed_config without the section. These names are unique to Accelerate.
_INNER_MARKS = ("zero_stage", "offload_optimizer_device", "offload_param_device")

# Keys of the launcher with their defaults. `onefold launch` and torchrun have arguments for them.
_LAUNCHER: dict[str, Any] = {
    "num_processes": None, "num_machines": 1, "machine_rank": 0, "main_process_ip": None, "main_process_port": None,
    "main_training_function": "main", "rdzv_backend": "static", "rdzv_endpoint": None, "same_network": True,
    "gpu_ids": "all", "use_cpu": False, "debug": False, "enable_cpu_affinity": False, "downcast_bf16": False,
    "dynamo_backend": "NO", "dynamo_config": {}, "mpirun_config": {}, "ipex_config": {}, "command_file": None,
    "commands": None, "tpu_env": [], "tpu_name": None, "tpu_zone": None, "tpu_use_cluster": False,
    "tpu_use_sudo": False,
}  # fmt: skip
_DEEPSPEED_LAUNCHER: dict[str, Any] = {
    "deepspeed_multinode_launcher": "standard", "deepspeed_hostfile": None, "deepspeed_exclusion_filter": None,
    "deepspeed_inclusion_filter": None,
}  # fmt: skip
_OTHER_TRAINERS = ("fsdp_config", "megatron_lm_config", "parallelism_config", "aws_config")
# Paths in DeepSpeed's schema by Accelerate's names.
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
_TOP = (*_MARKS, "mixed_precision", "fp8_config", *_RENAMED, *_LAUNCHER, *_OTHER_TRAINERS)


@dataclass
class Translation:
    """A translated DeepSpeed config, with notices and refusals for the keys that are not part of it."""

    document: dict[str, Any] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def put(self, path: str, value: Any, source: str) -> None:
        """Set the key at a dotted path. Raise if another key or `deepspeed_config_file` has set a different value."""
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
            raise ConfigError(f"{source} = {value!r}, but {path} is already {has!r}. Keep one of them.")
        inner[name] = value


def is_accelerate(document: Mapping[str, Any]) -> bool:
    """Return whether a document uses Accelerate's schema rather than DeepSpeed's."""
    return any(mark in document for mark in (*_MARKS, *_INNER_MARKS))


def translate_accelerate(document: Mapping[str, Any], folder: str | None = None) -> Translation:
    """Translate Accelerate's keys to DeepSpeed's schema. A relative `deepspeed_config_file` may be in `folder`."""
    inner = {} if document.get("deepspeed_config") is None else document["deepspeed_config"]
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
    launcher = _non_default(inner, _DEEPSPEED_LAUNCHER, "deepspeed_config.") + _non_default(document, _LAUNCHER, "")
    if launcher:
        result.notices.append(f"{', '.join(launcher)}: these keys are for the launcher, and have no effect in a config")
    return result


def _deepspeed_key(result: Translation, name: str, value: Any, path: str) -> None:
    known = (*_RENAMED, *_OWN, *_DEEPSPEED_LAUNCHER, *spellings(ZeroOptimization))
    if name not in known:
        raise _unknown(path, name, known)
    if is_absent(value):
        return
    if name in _RENAMED:
        result.put(_RENAMED[name], value, path)
    elif name == "deepspeed_moe_layer_cls_names":
        classes = value.split(",") if isinstance(value, str) else read_as(path, value, tuple[str, ...], Key(""))
        result.put("zero_optimization.leaf_module.classes", [part.strip() for part in classes], path)
    elif name == "zero3_init_flag":
        if read_as(path, value, bool, Key("")):
            result.notices.append(f"{path} = true: only the script that builds the model reads it")
    elif name in spellings(ZeroOptimization):
        # Accelerate ignores these keys silently, but users expect them to have an effect.
        result.put(f"zero_optimization.{name}", value, path)


def _top_key(result: Translation, name: str, value: Any) -> None:
    if name == "mixed_precision":
        _mixed_precision(result, value)
    elif name == "distributed_type":
        if str(value).upper() not in ("DEEPSPEED", "NO", "MULTI_GPU", "MULTI_CPU"):
            result.refusals.append(f"distributed_type = {value}: the config is for another trainer")
    elif name in _RENAMED or name == "zero3_init_flag" or name in spellings(ZeroOptimization):
        _deepspeed_key(result, name, value, name)
    elif name == "fp8_config":
        _fp8_section(result, value or {})
    elif name in _OTHER_TRAINERS:
        if value:
            result.refusals.append(f"{name}: the section is for another trainer; leave it out")
    elif name not in _TOP:
        raise _unknown(name, name, _TOP)


def _mixed_precision(result: Translation, value: Any) -> None:
    # YAML 1.1 reads a bare `no` as false.
    if value is False or is_absent(value) or value == "no":
        return
    if value == "fp8":  # the other data types are those of bf16
        result.put("fp8.enabled", True, "mixed_precision")
        value = "bf16"
    if value not in ("fp16", "bf16"):
        raise wrong("mixed_precision", value, "no, fp16, bf16 or fp8")
    result.put(f"{value}.enabled", True, "mixed_precision")
    if value == "fp16":  # Accelerate then also casts inputs, unless the config file sets auto_cast
        result.document["fp16"].setdefault("auto_cast", True)


def _fp8_section(result: Translation, section: Mapping[str, Any]) -> None:
    """Read Accelerate's options for FP8. Only those of the backend AO, which is torchao, have a meaning here."""
    backend = str(section.get("backend", "AO")).upper()
    if backend != "AO":
        result.refusals.append(f"fp8_config.backend = {backend}: its kernels are not used here; set backend to AO")
    elif not is_absent(gathers := section.get("enable_fsdp_float8_all_gather")):
        path = "fp8_config.enable_fsdp_float8_all_gather"
        if not read_as(path, gathers, bool, Key("")):
            result.put("fp8.all_gather", False, path)


def _named_file(name: str, folder: str | None) -> dict[str, Any]:
    """Read `deepspeed_config_file` relative to the working directory, as Accelerate does, or to the YAML file."""
    in_folder = os.path.join(folder, name) if folder else name
    return read_source(in_folder if not os.path.exists(name) and os.path.exists(in_folder) else name)


def _non_default(keys: Mapping[str, Any], quiet: Mapping[str, Any], prefix: str) -> list[str]:
    return [
        prefix + name
        for name, default in quiet.items()
        if not is_absent(value := keys.get(name))
        and value not in (default, str(default), "no" if default is False else default)
    ]


def _unknown(path: str, name: str, known: tuple[str, ...]) -> ConfigError:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"; did you mean {path.removesuffix(name)}{near[0]}?" if near else ""
    return ConfigError(f"{path}: there is no such key in an Accelerate config{hint}")
