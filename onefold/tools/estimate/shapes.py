"""Shapes of well-known models by name, and the config.json of a model on disk.

This module does not import torch, so that a model that cannot be read is refused at once.
"""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Any

from onefold.config.config_files import parse_json
from onefold.storage.object_path import ObjectPath
from onefold.storage.place import place, read_small, reason
from onefold.tools.estimate.machines import PlanError
from onefold.tools.estimate.model_configs import MODELS, known_model
from onefold.tools.train.options import PRESET_NAMES

_MOST_BYTES = 1 << 24
_MOST_LAYERS = 4096


def _shape(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, *, tied: bool, gated: bool
) -> dict[str, Any]:
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    return {**shape, "vocabulary": vocabulary, "tied": tied, "gated": gated}


SHAPES = {
    "GPT 125M": _shape(12, 768, 12, 12, 3072, 50257, tied=True, gated=False),
    "GPT 1.3B": _shape(24, 2048, 16, 16, 8192, 50257, tied=True, gated=False),
    "Llama 1B": _shape(16, 2048, 32, 8, 8192, 128256, tied=True, gated=True),
    "Llama 7B": _shape(32, 4096, 32, 32, 11008, 32000, tied=False, gated=True),
    "Llama 8B": _shape(32, 4096, 32, 8, 14336, 128256, tied=False, gated=True),
    "Llama 13B": _shape(40, 5120, 40, 40, 13824, 32000, tied=False, gated=True),
    "Llama 70B": _shape(80, 8192, 64, 8, 28672, 32000, tied=False, gated=True),
}
"""Shapes by the names that docs/what-fits.html shows."""

# Maximum positions of these models; the page ignores them.
_POSITIONS = {"GPT 125M": 1024, "GPT 1.3B": 2048, "Llama 1B": 131072, "Llama 8B": 8192}
_RELEASES = {
    "llama-2-7b": "Llama 7B", "llama-2-13b": "Llama 13B", "llama-2-70b": "Llama 70B", "llama-3-8b": "Llama 8B",
    "llama-3.2-1b": "Llama 1B",
}  # fmt: skip


def known_shape(text: str) -> str | None:
    """Return the key of `SHAPES` for 7b, llama-7b, Llama 7B, llama2-7b, meta-llama/Llama-3-8B and the like."""
    name = re.sub(r"^(meta-llama/)?(meta-)?", "", text.strip().lower())
    name = re.sub(r"[ _-]+", "-", name)
    name = re.sub(r"^llama-?(?=[23][.-])", "llama-", name)
    full = {key.lower().replace(" ", "-"): key for key in SHAPES}
    short = {key.partition(" ")[2].lower(): key for key in SHAPES}
    return {**short, **full, **_RELEASES}.get(name)


def transformers_config(name: str) -> dict[str, Any]:
    """Return the config.json of a known shape for transformers."""
    shape = SHAPES[name]
    if not shape["gated"]:
        config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": shape["layers"]}
        config |= {"n_embd": shape["hidden"], "n_head": shape["heads"], "n_inner": shape["ffn"]}
        config |= {"n_positions": _POSITIONS[name]}
    else:
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": shape["layers"]}
        config |= {"hidden_size": shape["hidden"], "intermediate_size": shape["ffn"]}
        config |= {"num_attention_heads": shape["heads"], "num_key_value_heads": shape["kv_heads"]}
        config |= {"max_position_embeddings": _POSITIONS.get(name, 4096)}
    return {**config, "vocab_size": shape["vocabulary"], "tie_word_embeddings": shape["tied"]}


class ModelKind(Enum):
    """The kinds of models that `--model` can name."""

    PRESET = "a preset of onefold train"
    CONFIG = "a folder or config.json of transformers"
    CHECKPOINT = "a checkpoint of onefold"
    FACTORY = "module:function"
    KNOWN = "a well-known shape"


def classify_model(text: str) -> ModelKind:
    """Return the kind of model that `--model` names, or raise PlanError. Reads files, and imports nothing."""
    try:
        path = place(text)
        if isinstance(path, ObjectPath):
            return ModelKind.CHECKPOINT
        exists, is_folder = path.exists(), path.is_dir()
        has_config = (path / "config.json").exists()
    except OSError as error:
        raise PlanError(f"--model {text}: cannot be read ({reason(error)}).") from error
    if not exists:
        return _classify_name(text)
    if is_folder and not has_config:
        return ModelKind.CHECKPOINT
    config = path / "config.json" if is_folder else path
    if "model_type" in read_config(config):
        return ModelKind.CONFIG
    if is_folder:
        return ModelKind.CHECKPOINT
    raise PlanError(f"--model {text}: not a config of transformers, because model_type is missing.")


def _classify_name(text: str) -> ModelKind:
    if text in PRESET_NAMES:
        return ModelKind.PRESET
    if known_model(text) is not None or known_shape(text) is not None:
        return ModelKind.KNOWN
    if ":" in text:
        return ModelKind.FACTORY
    names = ", ".join((*PRESET_NAMES, *(key.lower().replace(" ", "-") for key in SHAPES), *MODELS))
    raise PlanError(
        f"--model {text}: no such file or folder (nothing is downloaded). Give a folder or config.json of "
        f"transformers, a checkpoint, module:function, or one of {names}."
    )


def read_config(path: Path) -> dict[str, Any]:
    """Read a config.json. Only limits that keep a dry run short are checked; transformers checks the rest."""
    try:
        text = read_small(path, _MOST_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"--model {path}: the config cannot be read ({reason(error)}).") from error
    found = parse_json(text, f"--model {path}")
    for key in ("num_hidden_layers", "num_layers", "n_layer", "n_layers"):
        layers = found.get(key)
        if isinstance(layers, int) and layers > _MOST_LAYERS:
            raise PlanError(f"--model {path}: {key} is {layers}. At most {_MOST_LAYERS} layers can be planned.")
    return found
