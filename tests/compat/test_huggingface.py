"""transformers and PEFT models, tiny, as people run them: built under Init, trained, generating, saved, adapted."""

from __future__ import annotations

import faulthandler
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering
from models import Trace, config, more, one_in, precision, rank, start, weights_of
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

import onefold
from onefold.compat import deepspeed
from onefold.compat.parameters import install
from onefold.runtime import handle_of, unsharded_shape
from onefold.runtime.parameter_proxy import plain_class
from onefold.utils import safe_get_full_fp32_param, safe_get_full_grad

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")

VOCABULARY = 100
KINDS = ["llama", "gpt2", "t5", "mixtral"]


def limited(case: Callable[..., Any]) -> Callable[..., Any]:
    """A rank that hangs says where, and dies, before the pool gives it up."""

    @wraps(case)
    def run(*args: Any, **kwargs: Any) -> Any:
        os.environ["HF_HUB_OFFLINE"] = "1"
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        faulthandler.dump_traceback_later(45, exit=True)
        try:
            return case(*args, **kwargs)
        finally:
            faulthandler.cancel_dump_traceback_later()

    return run


def settings_of(kind: str, **more: Any) -> Any:
    import transformers

    shape: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **more}
    if kind == "gpt2":  # tied embeddings, Conv1D, dropout
        return transformers.GPT2Config(**{"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **shape})
    if kind == "t5":  # three modules share one embedding; dropout
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
        return transformers.T5Config(**{**sizes, **shape})
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape = {**sizes, "num_key_value_heads": 2, "max_position_embeddings": 64, **shape}
    if kind == "mixtral":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
        return transformers.MixtralConfig(**{**experts, **shape})
    return transformers.LlamaConfig(**shape)


def class_of(kind: str) -> Any:
    import transformers

    return {
        "llama": transformers.LlamaForCausalLM,
        "gpt2": transformers.GPT2LMHeadModel,
        "t5": transformers.T5ForConditionalGeneration,
        "mixtral": transformers.MixtralForCausalLM,
    }[kind]


def auto_class(kind: str) -> Any:
    import transformers

    return transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM


def build(kind: str, seed: int = 5, **more: Any) -> Any:
    torch.manual_seed(seed)
    return class_of(kind)(settings_of(kind, **more)).train()


def build_sharded(kind: str, settings: dict[str, Any], seed: int = 5, **more: Any) -> Any:
    install()  # PEFT reads `ds_shape` and `ds_numel` of sharded parameters
    torch.manual_seed(seed)
    with onefold.zero.Init(config_dict_or_path=settings):
        return class_of(kind)(settings_of(kind, **more)).train()


def start_as_deepspeed(model: Any, settings: dict[str, Any]) -> Any:
    """An engine with the methods that accelerate calls."""
    return deepspeed.initialize(model=model, config={"log_level": "warning", **settings})[0]


def tokens(num: int, seed: int = 0, size: int = 4, length: int = 9) -> list[torch.Tensor]:
    """Different on every rank, the same in every run."""
    generator = torch.Generator().manual_seed(1000 * seed + rank())
    return [torch.randint(3, VOCABULARY, (size, length), generator=generator) for _ in range(num)]


def train(engine: onefold.Engine, num_steps: int = 3, seed: int = 0) -> Trace:
    losses, norms = [], []
    torch.manual_seed(99 + rank())  # dropout
    for x in tokens(num_steps, seed):
        loss = engine(input_ids=x, labels=x).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    return Trace(losses, norms, weights_of(engine.module))


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def copy_of(tensors: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in dict(tensors).items()}


def tied(kind: str, model: Any) -> bool:
    if kind == "gpt2":
        return model.lm_head.weight is model.transformer.wte.weight
    if kind == "t5":
        others = (model.lm_head, model.encoder.embed_tokens, model.decoder.embed_tokens)
        return all(other.weight is model.shared.weight for other in others)
    return model.lm_head.weight is not model.model.embed_tokens.weight


def at_rest(model: nn.Module) -> bool:
    return all(parameter.numel() == 0 for parameter in model.parameters() if handle_of(parameter) is not None)


# -- 1. building under Init -------------------------------------------------------------------------------------


class LiveParameters(TorchFunctionMode):
    """The most elements of parameters that were whole at once, looked at after every call of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._seen: dict[int, weakref.ref[nn.Parameter]] = {}

    def __enter__(self) -> LiveParameters:
        self._handle = register_module_parameter_registration_hook(self._taken)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._handle.remove()
        super().__exit__(*error)

    def _taken(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            self._seen[id(parameter)] = weakref.ref(parameter)
        self.look()

    def look(self) -> None:
        with torch._C.DisableTorchFunction():  # asking must not gather
            live = [parameter for seen in self._seen.values() if (parameter := seen()) is not None]
            self.most = max(self.most, sum(parameter.numel() for parameter in live))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.look()
        return result


@limited
def built_under_init(kind: str, how: str, dtype: str) -> dict[str, bool]:
    plain = build(kind)
    buffers = copy_of(plain.named_buffers())
    plain = plain.bfloat16() if dtype == "bf16" else plain
    settings = config(3, **precision(dtype))
    torch.manual_seed(5 + rank())  # rank 0's values count
    with onefold.zero.Init(config_dict_or_path=settings):
        model = (
            class_of(kind)(settings_of(kind)) if how == "constructor" else auto_class(kind).from_config(plain.config)
        )
    resting = at_rest(model)
    return {
        "resting": resting or torch.distributed.get_world_size() == 1,
        "shapes": [unsharded_shape(p) for p in model.parameters()] == [p.shape for p in plain.parameters()],
        "values": same(weights_of(model), copy_of(plain.state_dict())),
        # Floating-point buffers (rotary frequencies) stay as the constructor made them.
        "buffers": same(copy_of(model.named_buffers()), buffers),
        "tied": tied(kind, model),
    }


@pytest.mark.parametrize(("world", "how", "dtype"), [(2, "constructor", "fp32"), (2, "from_config", "bf16")])
@pytest.mark.parametrize("kind", one_in(2, KINDS))
def test_init_gives_the_model_that_a_plain_constructor_gives(on_ranks, world, kind, how, dtype):
    for found in on_ranks(world, built_under_init, kind, how, dtype):
        assert all(found.values()), found


@limited
def built_in_half(declared: bool) -> tuple[bool, bool]:
    """transformers itself builds in bf16, whatever the config of the engine says."""
    torch.manual_seed(5)
    plain = auto_class("llama").from_config(settings_of("llama"), dtype=torch.bfloat16)
    torch.manual_seed(5)
    with onefold.zero.Init(config_dict_or_path=config(3, **precision("bf16" if declared else "fp32"))):
        model = auto_class("llama").from_config(settings_of("llama"), dtype=torch.bfloat16)
    return at_rest(model), same(weights_of(model), copy_of(plain.state_dict()))


@pytest.mark.parametrize("declared", [True, False])
def test_a_model_built_in_bf16_keeps_its_values(on_ranks, declared):
    assert on_ranks(2, built_in_half, declared) == [(True, True)] * 2


@limited
def most_alive(kind: str) -> tuple[int, int]:
    layers = {"gpt2": {"n_layer": 8}, "t5": {"num_layers": 4}}.get(kind, {"num_hidden_layers": 8})
    with LiveParameters() as live, onefold.zero.Init(config_dict_or_path=config(3)):
        model = class_of(kind)(settings_of(kind, **layers))
    return live.most, sum(unsharded_shape(parameter).numel() for parameter in model.parameters())


@pytest.mark.parametrize("kind", one_in(4, KINDS))
def test_no_rank_ever_holds_the_whole_model_while_it_is_built(on_ranks, kind):
    for most, whole in on_ranks(2, most_alive, kind):
        assert 0 < most < whole / 4, (most, whole)


# -- 2. training ------------------------------------------------------------------------------------------------

AUTO = {
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}


@limited
def stages(kind: str, dtype: str, auto: bool) -> list[Any]:
    found = []
    for stage in range(4):
        more = AUTO if auto else {"gradient_clipping": 1.0}
        engine = start(build(kind), config(stage, **more, **precision(dtype)))
        found.append(train(engine))
        engine.destroy()
    settings = config(3, **more, **precision(dtype))
    engine = start(build_sharded(kind, settings), settings)
    found.append(train(engine))
    return [trace.same(found[0]) for trace in found] + [found[0].losses[0] != found[0].losses[-1]]


@pytest.mark.parametrize(
    ("kind", "dtype", "world", "auto"),
    [
        ("llama", "bf16", 2, False),
        more("gpt2", "fp32", 2, False),
        more("t5", "fp32", 2, False),
        ("mixtral", "fp32", 2, False),
        more("llama", "fp32", 2, True),
        more("gpt2", "bf16", 1, False),
        more("llama", "fp32", 1, False),
        ("t5", "fp32", 1, True),
    ],
)
def test_every_stage_trains_to_the_same_bits(on_ranks, world, kind, dtype, auto):
    for found in on_ranks(world, stages, kind, dtype, auto):
        assert all(found), found


# -- 3. evaluation, generation, recomputation -------------------------------------------------------------------


def generate(engine: onefold.Engine, quiet: str, ragged: bool) -> tuple[list[list[int]], float]:
    """On the bare module, as the Trainer does."""
    model: Any = engine.module.eval()
    x = tokens(1, seed=7, size=2, length=5)[0]
    length = 5 + (3 * rank() if ragged else 0)
    with torch.no_grad() if quiet == "no_grad" else torch.inference_mode():
        limits = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False}
        made = model.generate(input_ids=x, attention_mask=torch.ones_like(x), **limits)
        loss = model(input_ids=x, labels=x).loss.item()
    model.train()
    return made.tolist(), loss


@limited
def trains_and_generates(kind: str, quiet: str, ragged: bool, reentrant: bool | None) -> tuple[bool, bool, bool]:
    found = []
    for stage in (0, 3):
        settings = config(stage, gradient_clipping=1.0)
        model = build_sharded(kind, settings) if stage == 3 else build(kind)
        if reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        engine = start(model, settings)
        torch.manual_seed(3 + rank())
        made, losses = [generate(engine, quiet, ragged)], []
        for x in tokens(3):
            loss = engine(input_ids=x, labels=x).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            made.append(generate(engine, quiet, ragged))
        with onefold.zero.GatheredParameters(engine.module.parameters()):
            found.append((made, losses, copy_of(engine.module.state_dict())))
        resting = stage == 0 or at_rest(engine.module)
        engine.destroy()
    return found[0][:2] == found[1][:2], same(found[0][2], found[1][2]), resting


@pytest.mark.parametrize(
    ("kind", "quiet", "ragged"),
    [
        ("llama", "no_grad", True),
        more("llama", "inference_mode", False),
        more("gpt2", "inference_mode", True),
        more("t5", "no_grad", False),
        more("t5", "inference_mode", True),
    ],
)
def test_generating_between_steps_gives_the_same_tokens_and_changes_no_bit(on_ranks, kind, quiet, ragged):
    assert on_ranks(2, trains_and_generates, kind, quiet, ragged, None) == [(True, True, True)] * 2


@covering(
    kind=("llama", more("t5"), more("gpt2"), more("mixtral")),
    reentrant=(True, more(False)),
    where=lambda kind, reentrant: (kind, reentrant) not in (("gpt2", False), ("mixtral", True)),
    strength=1,
)
def test_gradient_checkpointing_changes_no_bit(on_ranks, kind, reentrant):
    assert on_ranks(2, trains_and_generates, kind, "no_grad", False, reentrant) == [(True, True, True)] * 2


# -- 4. saving for from_pretrained ------------------------------------------------------------------------------


@limited
def saved(folder: str, kind: str, stage: int, way: str) -> dict[str, bool]:
    settings = config(stage, **precision("bf16"))
    begin = start_as_deepspeed if way == "accelerate" else start
    engine = begin(build_sharded(kind, settings) if stage == 3 else build(kind), settings)
    train(engine, 1)
    model: Any = engine.module
    expected = weights_of(model)
    if way in ("single", "pieces"):
        engine.save_16bit_model(folder, max_shard_size="5GB" if way == "single" else "20KB")
        if rank() == 0:
            model.config.save_pretrained(folder)
    elif way == "accelerate":
        state = engine._zero3_consolidated_16bit_state_dict()
        assert (state is None) == (rank() != 0)
        if state is not None:
            model.save_pretrained(folder, state_dict=state)
    elif way == "gathered":
        with onefold.zero.GatheredParameters(model.parameters()):
            if rank() == 0:
                model.save_pretrained(folder)
    else:
        onefold.zero.gather_distributed_parameters(model)
        if way == "whole on all" or rank() == 0:
            model.save_pretrained(folder)
    torch.distributed.barrier()
    fresh = auto_class(kind).from_pretrained(folder, dtype=torch.bfloat16)
    trained_on = train(engine, 1)  # and training goes on
    return {
        "values": same(copy_of(fresh.state_dict()), expected),
        "tied": tied(kind, fresh),
        "pieces": (Path(folder) / "model.safetensors.index.json").exists() == (way == "pieces"),
        "resting": stage < 3 or at_rest(model),
        "learnt": not same(trained_on.weights, expected),
    }


@pytest.mark.parametrize(
    ("kind", "stage", "way"),
    [
        more("llama", 3, "single"),
        ("llama", 3, "pieces"),
        more("llama", 3, "gathered"),
        ("gpt2", 3, "single"),
        more("gpt2", 3, "accelerate"),
        ("gpt2", 3, "whole on all"),
        more("gpt2", 2, "pieces"),
        more("t5", 3, "pieces"),
        more("t5", 3, "accelerate"),
        more("t5", 3, "whole"),
        ("mixtral", 3, "pieces"),
    ],
)
def test_from_pretrained_loads_what_was_saved(on_ranks, tmp_path, kind, stage, way):
    for found in on_ranks(2, saved, str(tmp_path), kind, stage, way):
        assert all(found.values()), found


# -- 5. loading what transformers saved -------------------------------------------------------------------------


@limited
def loaded(folder: str, kind: str, size: str, dtype: str, when: str) -> tuple[bool, bool, bool, int, int]:
    plain = build(kind, seed=8)
    if rank() == 0:
        # Mixture models are otherwise written under the names of their first release, which only transformers maps.
        plain.save_pretrained(folder, max_shard_size=size, save_original_format=False)
    torch.distributed.barrier()
    settings = config(3, **precision(dtype))
    model = build_sharded(kind, settings)
    engine = start(model, settings) if when == "engine" else None
    read = onefold.zero.load_safetensors(model, folder)
    plain = plain.bfloat16() if dtype == "bf16" else plain
    expected = copy_of(plain.state_dict())
    fits = same(weights_of(model), expected)
    master = engine is None or torch.equal(
        safe_get_full_fp32_param(model.lm_head.weight), plain.lm_head.weight.float().detach()
    )
    return fits, master, at_rest(model), read, 4 * sum(parameter.numel() for parameter in plain.parameters())


@pytest.mark.parametrize(
    ("kind", "dtype", "size", "when"),
    [
        ("llama", "bf16", "5GB", "init"),
        ("llama", "fp32", "20KB", "engine"),
        ("gpt2", "fp32", "20KB", "init"),
        ("t5", "bf16", "5GB", "engine"),
        ("mixtral", "fp32", "20KB", "init"),
    ],
)
def test_each_rank_reads_its_ranges_of_what_transformers_saved(on_ranks, tmp_path, kind, dtype, size, when):
    results = on_ranks(2, loaded, str(tmp_path), kind, size, dtype, when)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or size == "20KB"
    for fits, master, resting, _, _ in results:
        assert fits
        assert master
        assert resting
    assert sum(read for *_, read, _ in results) == results[0][-1]  # every byte once


# -- 6. the ways transformers calls GatheredParameters ----------------------------------------------------------


def resize(model: Any, size: int) -> None:
    """transformers' resize_token_embeddings under ZeRO-3, its gathers pointed here (modeling_utils.py)."""
    gathers = onefold.zero.GatheredParameters
    for old, attach in ((model.get_input_embeddings(), model.set_input_embeddings), (model.lm_head, None)):
        linear = attach is None
        if linear and old.weight is model.get_input_embeddings().weight:
            continue
        with gathers(old.weight, modifier_rank=None):
            num, width = old.weight.size()
        made = nn.Linear(width, size, bias=False) if linear else nn.Embedding(size, width)
        made.weight.requires_grad_(old.weight.requires_grad)
        nn.init.normal_(made.weight, std=0.02)
        with gathers([old.weight, made.weight, getattr(old, "bias", None)], modifier_rank=0):
            made.weight.data[:num] = old.weight.data[:num]
        if linear:
            model.lm_head = made
        else:
            with gathers([old.weight, made.weight], modifier_rank=0):
                old.weight = made.weight
                old.num_embeddings = made.weight.data.shape[0]
    model.config.vocab_size = size


@limited
def resized(kind: str) -> tuple[bool, bool]:
    found = []
    for stage in (0, 3):
        settings = config(stage, gradient_clipping=1.0)
        model = build_sharded(kind, settings) if stage == 3 else build(kind)
        torch.manual_seed(11)
        if kind == "gpt2":  # tied: both names get the new weight
            resize(model, VOCABULARY + 7)
            model.lm_head.weight = model.transformer.wte.weight
        else:
            resize(model, VOCABULARY + 7)
        engine = start(model, settings)
        found.append(train(engine))
    embedding = weights_of(engine.module)[next(name for name in found[1].weights if "embed" in name or "wte" in name)]
    return found[0].same(found[1]), embedding.shape[0] == VOCABULARY + 7


@pytest.mark.parametrize("kind", ["llama", more("gpt2")])
def test_embeddings_resized_between_init_and_initialize_train_equal(on_ranks, kind):
    assert on_ranks(2, resized, kind) == [(True, True)] * 2


@limited
def gathers(kind: str, engaged: bool) -> dict[str, bool]:
    settings = config(3)
    model = build_sharded(kind, settings)
    if engaged:
        start(model, settings)
    gather = onefold.zero.GatheredParameters
    plain, expected = build(kind), {}
    expected = copy_of(plain.state_dict())
    found = {}
    # `list({set})`: another order on each rank (modeling_utils.py, missing keys).
    shuffled = [list(model.parameters())[i] for i in torch.randperm(len(list(model.parameters())))]
    with gather(shuffled, modifier_rank=0):
        found["set"] = same(copy_of(model.state_dict()), expected)
    with gather(p for p in model.parameters()):
        found["generator"] = same(copy_of(model.state_dict()), expected)
    with gather([model.lm_head.weight, getattr(model.lm_head, "bias", None)], modifier_rank=0):
        found["none"] = torch.equal(model.lm_head.weight, plain.lm_head.weight)
    with gather(plain.lm_head.weight, modifier_rank=0), gather([], modifier_rank=0):
        found["not ours"] = True
    # What accelerate and TRL collect: every value of a state dict that keeps its tensors, buffers among them.
    with gather(list(model.parameters())):
        values = list(model.state_dict(keep_vars=True).values())
    values += list(model.buffers())
    found["at rest"] = at_rest(model)
    with gather(values, modifier_rank=0):
        found["kept"] = same({k: v.detach().clone() for k, v in model.state_dict().items()}, expected)
    # Module by module, as initialize_weights_zero3 does.
    for module in model.modules():
        with gather(list(module.parameters(recurse=False)), modifier_rank=0):
            for parameter in module.parameters(recurse=False):
                if rank() == 0:
                    nn.init.constant_(parameter, 0.25)
    found["module by module"] = all(bool((value == 0.25).all()) for value in weights_of(model).values())
    return found


@covering(kind=("llama", "t5"), engaged=(False, True), strength=1)
def test_gathered_parameters_takes_what_transformers_passes(on_ranks, kind, engaged):
    for found in on_ranks(2, gathers, kind, engaged):
        assert all(found.values()), found


@limited
def replaced_inside() -> tuple[bool, bool]:
    """`module.weight = other` inside the context; the old weight's home closes without the new one."""
    found = []
    for stage in (0, 3):
        settings = config(stage)
        model = build_sharded("llama", settings) if stage == 3 else build("llama")
        with onefold.zero.GatheredParameters([model.lm_head.weight, model.model.embed_tokens.weight], modifier_rank=0):
            model.lm_head.weight = model.model.embed_tokens.weight  # tied by hand
            model.model.norm.weight = nn.Parameter(torch.full((32,), 1.5))
        engine = start(model, settings)
        found.append(train(engine))
    return found[0].same(found[1]), engine.module.lm_head.weight is engine.module.model.embed_tokens.weight


def test_a_weight_replaced_inside_the_context_is_the_one_trained(on_ranks):
    assert on_ranks(2, replaced_inside) == [(True, True)] * 2


# -- 7. LoRA ----------------------------------------------------------------------------------------------------


def adapted(model: Any, dropout: float = 0.0) -> Any:
    import peft

    install()  # PEFT reads the shapes of sharded parameters as `ds_shape`
    torch.manual_seed(21)
    linear = ["c_attn"] if model.config.model_type == "gpt2" else ["q_proj", "v_proj"]
    settings = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules=linear, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, settings)


@limited
def lora_stages(kind: str, dtype: str, reentrant: bool | None) -> list[bool]:
    found = []
    for stage in (0, 1, 2, 3, "init"):
        settings = config(3 if stage == "init" else stage, gradient_clipping=1.0, **precision(dtype))
        model = build_sharded(kind, settings) if stage == "init" else build(kind)
        model = adapted(model, dropout=0.1)
        if reentrant is not None:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        engine = start(model, settings)
        found.append(train(engine))
        engine.destroy()
    learnt = any(bool(value.any()) for name, value in found[0].weights.items() if "lora_B" in name)
    return [trace.same(found[0]) for trace in found] + [learnt]


@needs_peft
@pytest.mark.parametrize(
    ("kind", "dtype", "world", "reentrant"),
    [
        more("llama", "bf16", 1, None),
        ("llama", "bf16", 2, None),
        more("llama", "fp32", 2, True),
        more("llama", "fp32", 2, False),
        more("gpt2", "fp32", 2, None),
    ],
)
def test_lora_trains_to_the_same_bits_in_every_stage(on_ranks, world, kind, dtype, reentrant):
    for found in on_ranks(world, lora_stages, kind, dtype, reentrant):
        assert all(found), found


@limited
def lora_bytes() -> dict[str, bool]:
    settings = config(3, **precision("bf16"))
    plain = adapted(build("llama"))
    trained, whole = plain.get_nb_trainable_parameters()
    model = adapted(build_sharded("llama", settings))
    under_init = model.get_nb_trainable_parameters()
    engine = start(model, settings)
    at_work = engine.module.get_nb_trainable_parameters()
    x = tokens(1)[0]
    engine.backward(engine(input_ids=x, labels=x).loss)
    parameters = dict(engine.module.named_parameters())
    gradients = {name: safe_get_full_grad(parameter) for name, parameter in parameters.items()}
    engine.step()
    held, planned = engine.model_memory.held_bytes(), engine.model_memory.planned_bytes()
    frozen = [run for unit in engine.state.schedule.units for run in unit.params if not run.trainable]
    adapters = [run for unit in engine.state.schedule.units for run in unit.params if run.trainable]
    padded = sum(run.layout.shard_size for run in adapters)
    return {
        "counted": (trained, whole) == under_init == at_work,
        "frozen have no gradient": all((g is None) == ("lora" not in name) for name, g in gradients.items()),
        "as planned": (held.parameters, held.masters, held.states)
        == (planned.parameters, planned.masters, planned.states),
        "states of adapters only": (held.masters, held.states) == (4 * padded, 8 * padded),
        "frozen are sharded": held.parameters == sum(2 * run.layout.shard_size for run in frozen),
        "frozen have no lines": all(run.store.grad is None for run in frozen),
        "shapes": all(
            tuple(p.ds_shape) == tuple(q.shape) for p, q in zip(parameters.values(), plain.parameters(), strict=True)
        ),
        "resting": at_rest(engine.module),
    }


@needs_peft
def test_a_frozen_base_is_sharded_and_has_neither_gradient_nor_state(on_ranks):
    for found in on_ranks(2, lora_bytes):
        assert all(found.values()), found


@limited
def adapter_saved(folder: str, way: str) -> tuple[bool, bool, bool]:
    import peft

    settings = config(3)
    begin = start_as_deepspeed if way == "consolidated" else start
    engine = begin(adapted(build_sharded("llama", settings)), settings)
    train(engine)
    model: Any = engine.module
    x = tokens(1, seed=3)[0]
    model.eval()
    with torch.no_grad():
        expected = model(input_ids=x).logits
    sizes = []
    if way == "state dict":
        state = engine.module_state_dict(exclude_frozen_parameters=True)
        sizes = [name for name in state if "lora" not in name]
        if rank() == 0:
            model.save_pretrained(folder, state_dict=state)
    elif way == "consolidated":
        state = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        if rank() == 0:
            model.save_pretrained(folder, state_dict=peft.get_peft_model_state_dict(model, state_dict=state))
    else:
        with onefold.zero.GatheredParameters(model.parameters()):
            if rank() == 0:
                model.save_pretrained(folder)
    torch.distributed.barrier()
    fresh = peft.PeftModel.from_pretrained(build("llama"), folder).eval()
    with torch.no_grad():
        again = torch.equal(fresh(input_ids=x).logits, expected)
    # Into a model that rests as shards, too.
    other = start(adapted(build_sharded("llama", settings)), settings)
    with onefold.zero.GatheredParameters(other.module.parameters(), modifier_rank=0):
        peft.set_peft_model_state_dict(other.module, peft.load_peft_weights(folder, device="cpu"))
    other.module.eval()
    with torch.no_grad():
        sharded = torch.equal(other.module(input_ids=x).logits, expected)
    return again, sharded, not sizes


@needs_peft
@pytest.mark.parametrize("way", [more("state dict"), "consolidated", more("gathered")])
def test_saved_adapters_give_the_same_outputs_in_a_fresh_model(on_ranks, tmp_path, way):
    assert on_ranks(2, adapter_saved, str(tmp_path), way) == [(True, True, True)] * 2


@limited
def merged(when: str) -> tuple[bool, bool]:
    found = []
    x = tokens(1, seed=3)[0]
    for stage in (0, 3):
        settings = config(stage)
        model = build_sharded("llama", settings) if stage == 3 else build("llama")
        engine = start(adapted(model), settings)
        train(engine)
        model = engine.module
        if when == "destroyed":
            engine.destroy()
        with onefold.zero.GatheredParameters(model.parameters(), modifier_rank=0):
            whole = model.merge_and_unload()
            values = copy_of(whole.state_dict())
        whole.eval()
        with torch.no_grad(), onefold.zero.GatheredParameters(whole.parameters()):
            found.append((values, whole(input_ids=x).logits))
    return same(found[0][0], found[1][0]), torch.equal(found[0][1], found[1][1])


@needs_peft
@pytest.mark.parametrize("when", ["live", more("destroyed")])
def test_adapters_are_merged_inside_gathered_parameters(on_ranks, when):
    assert on_ranks(2, merged, when) == [(True, True)] * 2


# -- 8. quantized bases -----------------------------------------------------------------------------------------


class PackedParameter(nn.Parameter):
    """A weight of four bits, two in a byte, that carries its scales: what bitsandbytes' Params4bit is."""

    scales: torch.Tensor

    @staticmethod
    def pack(weight: torch.Tensor, block: int = 16) -> PackedParameter:
        blocks = weight.detach().float().reshape(-1, block)
        scales = blocks.abs().amax(1, keepdim=True).clamp(min=1e-8) / 7
        codes = (blocks / scales).round().clamp(-8, 7).add(8).to(torch.uint8).flatten()
        packed = torch.Tensor._make_subclass(PackedParameter, (codes[::2] << 4 | codes[1::2]).view(-1, 1), False)
        packed.scales = scales
        return packed

    def unpack(self, shape: torch.Size) -> torch.Tensor:
        data = self.data.as_subclass(torch.Tensor).flatten()
        codes = torch.stack([data >> 4, data & 15], 1).flatten().float() - 8
        return (codes.view(self.scales.shape[0], -1) * self.scales).view(shape)


class QuantizedLinear(nn.Module):
    """A frozen packed base (a Parameter subclass, or plain int8), an adapter of two floating-point matrices."""

    def __init__(self, into: int, out: int, how: str) -> None:
        super().__init__()
        weight = torch.randn(out, into) * 0.1
        self.how, self.shape = how, weight.shape
        if how == "subclass":
            self.weight = PackedParameter.pack(weight)
        else:
            scale = weight.abs().amax() / 127
            codes = (weight / scale).round().to(torch.int8)
            self.register_buffer("scale", scale)
            if how == "parameter":
                self.weight = nn.Parameter(codes, requires_grad=False)
            else:
                self.register_buffer("weight", codes)
        self.lora_A = nn.Linear(into, 4, bias=False)
        self.lora_B = nn.Linear(4, out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.weight.unpack(self.shape) if self.how == "subclass" else self.weight.float() * self.scale
        return F.linear(x, whole) + self.lora_B(self.lora_A(x))


class QuantizedNet(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32).requires_grad_(False)
        self.blocks = nn.ModuleList(QuantizedLinear(32, 32, how) for _ in range(3))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return F.cross_entropy(self.head(h).flatten(0, 1), x.roll(-1, 1).flatten())


@limited
def quantized(how: str) -> dict[str, bool]:
    found = []
    for stage in (0, 3):
        settings = config(stage, gradient_clipping=1.0)
        torch.manual_seed(5)
        if stage == 3:
            with onefold.zero.Init(config_dict_or_path=settings):
                model = QuantizedNet(how)
        else:
            model = QuantizedNet(how)
        before = [(block.weight, plain_class(block.weight), block.weight.detach().clone()) for block in model.blocks]
        engine = start(model, settings)
        losses = []
        for x in tokens(3):
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        with onefold.zero.GatheredParameters([weight for weight, _, _ in before]):
            untouched = all(
                block.weight is weight and plain_class(weight) is kind and torch.equal(weight.detach(), value)
                for block, (weight, kind, value) in zip(engine.module.blocks, before, strict=True)
            )
        scales = how != "subclass" or all(block.weight.scales.numel() == 64 for block in engine.module.blocks)
        found.append((losses, weights_of(engine.module), untouched and scales))
    return {
        "losses": found[0][0] == found[1][0],
        "weights": same(found[0][1], found[1][1]),
        "untouched": found[0][2] and found[1][2],
        "all rest": at_rest(engine.module)
        and all((handle_of(block.weight) is None) == (how == "buffer") for block in model.blocks),
    }


@pytest.mark.parametrize("how", ["subclass", "parameter", "buffer"])
def test_quantized_weights_pass_untouched_with_adapters_trained_beside_them(on_ranks, how):
    for found in on_ranks(2, quantized, how):
        assert all(found.values()), found


# -- 9. a loss that reads the head ------------------------------------------------------------------------------


class FusedLoss(torch.autograd.Function):
    """Logits, loss and the gradient of the weight in one go: what fused losses do. Keeps no weight for backward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        flat, targets = hidden.flatten(0, 1), labels.flatten()
        logits = flat @ weight.t()
        slope = logits.softmax(1)
        slope[torch.arange(len(targets)), targets] -= 1
        slope /= len(targets)
        ctx.save_for_backward((slope @ weight).view(hidden.shape), slope.t() @ flat)
        return F.cross_entropy(logits, targets)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        return hidden * gradient, weight * gradient, None


@contextmanager
def maybe_gathered(model: Any, way: str) -> Iterator[torch.Tensor]:
    if way == "bare":
        yield model.lm_head.weight
        return
    with onefold.zero.GatheredParameters(model.lm_head.weight):
        yield model.lm_head.weight


@limited
def fused(kind: str, way: str, reentrant: bool | None) -> tuple[bool, bool]:
    found = []
    for stage in (0, 3):
        settings = config(stage, gradient_clipping=1.0)
        model = build_sharded(kind, settings) if stage == 3 else build(kind)
        if reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        engine = start(model, settings)
        torch.manual_seed(2 + rank())
        losses = []
        for x in tokens(4):
            # TRL: the backbone through the engine's module, then the head's weight outside its forward.
            hidden = engine.module.base_model(input_ids=x).last_hidden_state
            with maybe_gathered(engine.module, way) as weight:
                loss = FusedLoss.apply(hidden, weight, x)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found.append(Trace(losses, [engine.get_global_grad_norm()], weights_of(engine.module)))
    return found[0].same(found[1]), at_rest(engine.module)


@pytest.mark.parametrize(
    ("kind", "way", "reentrant"),
    [
        more("llama", "gathered", None),
        more("llama", "gathered", True),
        more("llama", "gathered", False),
        more("llama", "bare", None),
        more("gpt2", "gathered", None),
        ("gpt2", "bare", True),
    ],
)
def test_a_fused_loss_reads_the_head_outside_its_forward(on_ranks, kind, way, reentrant):
    assert on_ranks(2, fused, kind, way, reentrant) == [(True, True)] * 2


# -- where it had gaps


@limited
def cut_of(under_init: bool) -> list[str]:
    settings = config(3)
    build_it = build_sharded("llama", settings, vocab_size=33_000) if under_init else build("llama", vocab_size=33_000)
    engine = start(build_it, settings)
    names = [unit.name for unit in engine.state.schedule.units]
    engine.destroy()
    return names


def test_a_model_built_under_init_is_cut_like_a_plain_one(on_ranks):
    plain = on_ranks(2, cut_of, False)
    assert "lm_head" in plain[0]  # large enough to be a unit of its own
    assert on_ranks(2, cut_of, True) == plain


@limited
def data_given(engaged: bool, modifier: int | None) -> str:
    model: Any = build_sharded("llama", config(3))
    if engaged:
        start(model, config(3))
    try:
        with onefold.zero.GatheredParameters(model.parameters(), modifier_rank=modifier):
            model.lm_head.weight.data = torch.full((VOCABULARY, 32), 0.5)
    except RuntimeError as error:
        return str(error)
    return "written" if bool((weights_of(model)["lm_head.weight"] == 0.5).all()) else "lost"


@pytest.mark.parametrize(("engaged", "modifier"), [(False, 0), (True, 0), (True, None)])
def test_data_assigned_inside_gathered_parameters_is_taken(on_ranks, engaged, modifier):
    assert on_ranks(2, data_given, engaged, modifier) == ["written", "written"]


@limited
def resized_by_transformers(kind: str) -> bool:
    """Its own method; without its ZeRO-3 switch it assigns `.data` of another shape."""
    found = []
    for stage in (0, 3):
        settings = config(stage, gradient_clipping=1.0)
        model = build_sharded(kind, settings) if stage == 3 else build(kind)
        torch.manual_seed(11)
        with onefold.zero.GatheredParameters(model.parameters(), modifier_rank=0):
            model.resize_token_embeddings(VOCABULARY + 7, mean_resizing=False)
        found.append(train(start(model, settings)))
    return found[0].same(found[1])


def test_resize_token_embeddings_works_inside_gathered_parameters(on_ranks):
    assert on_ranks(2, resized_by_transformers, "llama") == [True, True]


@limited
def gathered_inside_init() -> bool:
    """What the constructors of wav2vec2, hubert and others do for their weight norm."""
    torch.manual_seed(5)
    with onefold.zero.Init():
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
        with onefold.zero.GatheredParameters(model.parameters(), modifier_rank=0):
            for parameter in model.parameters():
                nn.init.constant_(parameter, 0.5)
    return at_rest(model) and all(bool((value == 0.5).all()) for value in weights_of(model).values())


def test_gathered_parameters_works_inside_init(on_ranks):
    assert on_ranks(2, gathered_inside_init) == [True, True]


def whole_after_ragged_evaluation(folder: str, way: str) -> bool:
    """As after a `generate()` that took more tokens on one rank than on the other."""
    faulthandler.dump_traceback_later(10, exit=True)
    engine = start(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), config(3))
    with torch.no_grad():
        for _ in range(1 + 3 * rank()):
            engine.module(torch.ones(2, 8))
    if way == "save":
        engine.save_16bit_model(folder)
    else:
        with onefold.zero.GatheredParameters(engine.module.parameters(), modifier_rank=0):
            pass
    faulthandler.cancel_dump_traceback_later()
    return True


@pytest.mark.parametrize("way", ["save", "modifier_rank"])
def test_whole_weights_are_had_after_ranks_generated_different_lengths(on_ranks, tmp_path, way):
    assert on_ranks(2, whole_after_ragged_evaluation, str(tmp_path), way) == [True, True]
