"""Models to plan for, on the meta device: from a number, a config of transformers, a factory or a checkpoint."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onefold.checkpoint.format.files import CheckpointError
from onefold.checkpoint.format.shard_files import CheckpointReader
from onefold.plan.cut import cut
from onefold.runtime.torch_internals import inside_backward
from onefold.storage.place import Place, place
from onefold.tools.estimate.dry_run import META, LossOf
from onefold.tools.estimate.machines import PlanError
from onefold.tools.estimate.model_configs import MODELS, known_model
from onefold.tools.estimate.shapes import ModelKind, classify_model, known_shape, read_config, transformers_config

# The blocks of a model of which only the number of parameters is known.
_NUM_BLOCKS = 32


@dataclass(frozen=True)
class ModelSource:
    """A model that can be built on the meta device repeatedly."""

    name: str
    build: Callable[[], nn.Module]
    loss_of: Callable[[int, int], LossOf] | None
    """Return the loss function for a number of sequences and tokens. None: the inputs of the forward are unknown."""
    vocabulary: int | None = None
    sequence_length: int | None = None
    notes: tuple[str, ...] = ()
    recomputes: bool | None = None
    """Whether blocks are recomputed; None: `--recompute` is not offered for this model."""


def from_number(num_parameters: int) -> ModelSource:
    """Return a model of this many parameters in equal blocks, for model states alone."""
    sizes = [num_parameters // _NUM_BLOCKS + (place < num_parameters % _NUM_BLOCKS) for place in range(_NUM_BLOCKS)]
    note = (
        f"model states only, in {_NUM_BLOCKS} equal blocks: activations, logits, gathered parameters, traffic and "
        "time need a model (--model instead of --params)"
    )
    name = f"{num_parameters / 1e9:g} billion parameters" if num_parameters >= 1e8 else f"{num_parameters:,} parameters"
    return from_shapes(name, {f"blocks.{place}.weight": (size,) for place, size in enumerate(sizes)}, note)


def from_shapes(name: str, shapes: Mapping[str, tuple[int, ...]], *notes: str) -> ModelSource:
    """Return a model with these parameters and without a forward."""

    def build() -> nn.Module:
        with META:
            return _tree_of(shapes)

    return ModelSource(name, build, None, notes=notes)


def from_checkpoint(folder: Place) -> ModelSource:
    """Return a model with the parameters of a checkpoint, by the shapes in its manifest."""
    try:
        with CheckpointReader.open(folder) as checkpoint:
            shapes = {name: tuple(checkpoint.stored(f"model/{name}").shape) for name in checkpoint.names("model/")}
    except (OSError, CheckpointError) as error:
        raise PlanError(
            f"--model {folder}: contains neither a config.json of transformers nor a checkpoint of onefold ({error})."
        ) from error
    note = "model states only: a checkpoint has no forward (name a model to plan activations)"
    return from_shapes(f"checkpoint {folder}", shapes, note)


def _tree_of(shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """Build modules from the names of parameters. Children with numbers for names become a list, as blocks are."""
    children: dict[str, dict[str, tuple[int, ...]]] = {}
    own: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        first, _, rest = name.partition(".")
        if rest:
            children.setdefault(first, {})[rest] = shape
        else:
            own[first] = shape
    is_list = bool(children) and not own and all(name.isdigit() for name in children)
    module = nn.ModuleList() if is_list else nn.Module()
    for name, shape in own.items():
        module.register_parameter(name, nn.Parameter(torch.empty(shape)))
    for name, inside in children.items():
        module.add_module(name, _tree_of(inside))
    return module


def from_factory(spec: str, *, recompute: bool = False) -> ModelSource:
    """Return the model that `module:function` builds.

    Its forward takes tokens, tokens and targets, or what the model's `example_inputs(batch, length)` returns.
    """
    name, _, attribute = spec.partition(":")
    if not attribute:
        raise PlanError(f"--model {spec} is no model. Give a file, a folder, or module:function (mymodel:build).")
    sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(name), attribute)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise PlanError(f"--model {spec}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)

    def build() -> nn.Module:
        with META:
            model = factory()
        if not isinstance(model, nn.Module):
            raise PlanError(f"--model {spec}: returned a {type(model).__name__}, not an nn.Module")
        if recompute:
            recompute_blocks(model)
        return model

    def loss_of(batch: int, length: int) -> LossOf:
        return lambda call: _scalar(_call_with_tokens(call, batch, length))

    return ModelSource(spec, build, loss_of, vocabulary=_vocabulary_of(build_once(spec, build)), recomputes=recompute)


def build_once(name: str, build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model, and raise PlanError if that fails."""
    try:
        return build()
    except PlanError:
        raise
    except Exception as error:  # a model's code and transformers may raise anything
        text = " ".join(str(error).split())
        raise PlanError(f"{name}: the model cannot be built ({type(error).__name__}: {text}).") from error


def from_transformers(given: str, config: Mapping[str, Any], *, lora: int = 0, recompute: bool = False) -> ModelSource:
    """Return the model of a config.json. Nothing is downloaded, and no weights are read. `given` is for messages."""
    try:
        import transformers
        from transformers import AutoConfig
    except ImportError as error:
        raise PlanError(f"--model {given} needs transformers: pip install 'onefold[huggingface]' ({error})") from error
    try:
        settings: Any = AutoConfig.for_model(**config)
    except Exception as error:  # its type depends on the key that is wrong
        text = " ".join(str(error).split())
        raise PlanError(f"--model {given}: transformers rejects this config ({text}).") from error
    takes_pairs = bool(getattr(settings, "is_encoder_decoder", False))

    def build() -> nn.Module:
        names = [name for name in settings.architectures or () if hasattr(transformers, name)]
        auto = transformers.AutoModelForSeq2SeqLM if takes_pairs else transformers.AutoModelForCausalLM
        with META:
            model = getattr(transformers, names[0])(settings) if names else auto.from_config(settings)
        if recompute:
            model.gradient_checkpointing_enable()
        if lora:
            from peft import LoraConfig, get_peft_model

            with META:
                model = get_peft_model(model, LoraConfig(r=lora, target_modules="all-linear"))
            if recompute:
                model.enable_input_require_grads()
        model.train()
        return model  # type: ignore[no-any-return]

    def loss_of(batch: int, length: int) -> LossOf:
        tokens = torch.zeros(batch, length, dtype=torch.long, device=META)
        options = {} if takes_pairs else {"use_cache": False}
        return lambda call: call(input_ids=tokens, labels=tokens, **options).loss  # type: ignore[no-any-return]

    kind = str((settings.architectures or [settings.model_type])[0])
    name = f"{kind} of {given}{f', LoRA of rank {lora}' if lora else ''}"
    longest, vocabulary = (
        value if isinstance(value := getattr(settings, key, None), int) and value > 0 else None
        for key in ("max_position_embeddings", "vocab_size")
    )
    return ModelSource(name, build, loss_of, vocabulary, longest, recomputes=recompute)


def from_preset(name: str, *, recompute: bool = False) -> ModelSource:
    """Return a GPT of `onefold train`."""
    from onefold.tools.train.gpt import GPT, PRESETS

    shape = PRESETS[name]

    def build() -> nn.Module:
        with META:
            model = GPT(shape)
        if recompute:
            recompute_blocks(model)
        return model

    def loss_of(batch: int, length: int) -> LossOf:
        tokens = torch.zeros(batch, length, dtype=torch.long, device=META)
        return lambda call: call(tokens, tokens)  # type: ignore[no-any-return]

    return ModelSource(f"GPT {name}", build, loss_of, shape.vocab_size, shape.sequence_length, recomputes=recompute)


def find_model(text: str, *, lora: int = 0, recompute: bool = False) -> ModelSource:
    """Return the model that `--model` names."""
    kind, path = classify_model(text), Path(text)
    if kind is ModelKind.CONFIG:
        config = read_config(path / "config.json" if path.is_dir() else path)
        return from_transformers(text, config, lora=lora, recompute=recompute)
    if kind is ModelKind.KNOWN:
        published, name = known_model(text), known_shape(text)
        if published is not None:
            return from_transformers(published, MODELS[published], lora=lora, recompute=recompute)
        assert name is not None
        return from_transformers(name, transformers_config(name), lora=lora, recompute=recompute)
    if lora:
        raise PlanError(
            f"--lora needs a model of transformers, but {text} is not one. Freeze parameters in its factory instead."
        )
    if kind is ModelKind.PRESET:
        return from_preset(text, recompute=recompute)
    return from_factory(text, recompute=recompute) if kind is ModelKind.FACTORY else from_checkpoint(place(text))


def recompute_blocks(model: nn.Module) -> None:
    """Wrap every block that would be a unit in activation checkpointing."""
    for found in cut(model):
        if found.module:
            _recompute(model.get_submodule(found.module))


def _recompute(block: nn.Module) -> None:
    from torch.utils.checkpoint import checkpoint

    forward = block.forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if inside_backward():  # a chunked block recomputes itself
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    block.forward = recomputed  # type: ignore[method-assign]


def _call_with_tokens(call: Callable[..., Any], batch: int, length: int) -> Any:
    model: Any = getattr(call, "module", call)
    example = getattr(model, "example_inputs", None)
    if example is not None:
        with META:
            given = example(batch, length)
        return call(**given) if isinstance(given, dict) else call(*given)
    tokens = torch.zeros(batch, length, dtype=torch.long, device=META)
    required = [
        parameter
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return call(*[tokens] * max(len(required), 1))


def _scalar(output: Any) -> torch.Tensor:
    """Return the loss of an output, or compute one from logits."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss  # type: ignore[no-any-return]
    if isinstance(output, tuple | list):
        scalars = [each for each in output if isinstance(each, torch.Tensor) and each.numel() == 1]
        output = scalars[0] if scalars else output[0]
    if isinstance(output, torch.Tensor) and output.numel() == 1:
        return output
    if isinstance(output, torch.Tensor) and output.dim() == 3:
        targets = torch.zeros(output.shape[:2], dtype=torch.long, device=META)
        return nn.functional.cross_entropy(output.float().flatten(0, 1), targets.flatten())
    if isinstance(output, torch.Tensor):
        return output.float().pow(2).mean()
    raise PlanError(f"the model returned a {type(output).__name__}. Return a loss or logits.")


def _vocabulary_of(model: nn.Module) -> int | None:
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return max(tables, default=None)
