"""Reinforcement learning: weights for inference, engines that share weights, batches of any number of backwards, and
the example of docs/rl.md, which also puts states to sleep (`test_parking.py`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Block, batches, config, first_difference, more, net, precision, rank, start, train, weights_of
from torch import nn
from torch.nn import functional as F

import onefold
from onefold.compat.parameters import install
from onefold.zero import GatheredParameters, stream_weights

peft = pytest.importorskip("peft")


class Policy(nn.Module):
    """Layers of the kinds that LoRA adapts, with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 24)
        self.conv = nn.Conv1d(24, 24, 3, padding=1)
        self.layers = nn.ModuleList(Block(24) for _ in range(3))
        self.head = nn.Linear(24, 31)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.conv(self.embed(x).transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden).float().flatten(0, 1), y.flatten())


def lora(**more: Any) -> Any:
    torch.manual_seed(5)
    settings = {"r": 4, "target_modules": ["embed", "conv", "up", "down"], "init_lora_weights": False, **more}
    return peft.get_peft_model(Policy(), peft.LoraConfig(**settings))


# -- weights for inference ------------------------------------------------------------------------------------------


def streamed(model: nn.Module, bucket_bytes: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for bucket in stream_weights(model, bucket_bytes=bucket_bytes, merge_adapters=True):
        assert len(bucket) == 1 or sum(tensor.nbytes for tensor in bucket.values()) <= bucket_bytes
        found |= {name: tensor.clone() for name, tensor in bucket.items()}
    return found


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True, "r": 3},
    "bias": {"lora_bias": True, "target_modules": ["up"]},
    "saved modules": {"modules_to_save": ["head"]},
}


def merged(stage: int, dtype: str) -> dict[str, str]:
    """What differs between weights that are streamed after a step and PEFT's own merge of the same model."""
    told = {}
    for kind, settings in KINDS.items():
        model = lora(**settings)
        engine = start(model, config(stage, **precision(dtype)))
        train(engine, 1)
        before = weights_of(engine.module)
        found = streamed(engine.module, 4096)
        unchanged = first_difference(weights_of(engine.module), before)
        engine.destroy()
        plain = lora(**settings)
        for parameter in plain.parameters():
            parameter.data = parameter.data.to(torch.float32 if dtype == "fp32" else torch.bfloat16)
        plain.load_state_dict(before)
        expected = plain.merge_and_unload().state_dict()
        difference = first_difference(found, dict(expected))
        if unchanged or difference:
            told[kind] = f"{difference}; the model: {unchanged}"
    return told


@pytest.mark.parametrize(("stage", "dtype"), [more(3, "fp32"), more(2, "bf16"), (3, "bf16")])
def test_merged_weights_are_those_of_peft(on_ranks, stage, dtype):
    assert on_ranks(2, merged, stage, dtype) == [{}, {}]


def not_merged() -> list[str]:
    told = []
    models = [
        lambda: lora(use_dora=True, target_modules=["up", "down"]),
        lambda: peft.get_peft_model(Policy(), peft.IA3Config(target_modules=["up"], feedforward_modules=["up"])),
        lambda: peft.get_peft_model(Policy(), peft.LoHaConfig(target_modules=["up"])),
    ]
    for make in models:
        try:
            list(stream_weights(make(), merge_adapters=True))
        except ValueError as error:
            told.append(str(error))
    try:
        list(stream_weights(lora(), merge_adapters=True, exclude_frozen=True))
    except ValueError as error:
        told.append(str(error))
    return told


def test_adapters_that_cannot_be_merged_are_named(on_ranks):
    for dora, ia3, loha, frozen in on_ranks(1, not_merged):
        assert "layers.0.up" in dora
        assert "Dora" in dora
        assert "ia3" in ia3
        assert "loha" in loha
        assert "exclude_frozen" in frozen


def without_adapters() -> bool:
    model = net()
    plain = {name: tensor for bucket in stream_weights(model) for name, tensor in bucket.items()}
    same = {name: tensor for bucket in stream_weights(model, merge_adapters=True) for name, tensor in bucket.items()}
    return first_difference(plain, same) is None


def test_a_model_without_adapters_is_streamed_as_it_is(on_ranks):
    assert on_ranks(1, without_adapters) == [True]


# -- a loop of GatheredParameters -----------------------------------------------------------------------------------


def gathers_of(engine: onefold.Engine) -> int:
    return engine.ledger.calls("gather")


def looped(dtype: str) -> list[str]:
    engine, told = start(net(), config(3, **precision(dtype))), []
    train(engine, 1)
    expected = weights_of(engine.module)
    units = engine.state.schedule.sharded_units
    empty = engine.model_memory.held_bytes()
    engine.ledger.clear()
    found = {}
    for name, parameter in engine.module.named_parameters():
        with GatheredParameters([parameter]):
            found[name] = parameter.detach().clone()
        try:
            parameter.sum()
            told.append(f"{name} is read outside the context")
        except RuntimeError as error:
            if "GatheredParameters" not in str(error):
                told.append(str(error))
        kept = engine.model_memory.held_bytes().parameters - empty.parameters
        largest = max(param.layout.total * param.dtype.itemsize for unit in units for param in unit.sharded_params)
        if kept > largest:
            told.append(f"{kept} bytes stay, the largest unit has {largest}")
    told += filter(None, [first_difference(found, {name: expected[name] for name in found})])
    # Embedding and head are in one unit, which a loop in the order of the model comes to twice.
    if gathers_of(engine) != len(units) + 1:
        told.append(f"{gathers_of(engine)} gathers for {len(units)} units")
    engine.empty_partition_cache()
    if engine.model_memory.held_bytes() != empty:
        told.append("something stays after empty_partition_cache()")
    return told


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_loop_over_parameters_gathers_each_unit_once(on_ranks, dtype):
    assert on_ranks(2, looped, dtype) == [[], []]


def changed_in_between() -> list[str]:
    """Everything that changes a weight, or needs memory, between two reads of it."""
    install()  # for `ds_tensor`
    engine, told = start(net(), config(3)), []
    straight = start(net(), config(3))
    weight = engine.module.blocks[0].up.weight

    def read() -> torch.Tensor:
        with GatheredParameters([weight]):
            return weight.detach().clone()

    def check(what: str, expected: torch.Tensor, num_gathers: int) -> None:
        engine.ledger.clear()
        difference = first_difference(read(), expected)
        if difference or gathers_of(engine) != num_gathers:
            told.append(f"{what}: {difference}, {gathers_of(engine)} gathers")

    read()
    train(engine, 1)
    train(straight, 1)
    check("a step", weights_of(straight.module)["blocks.0.up.weight"], 1)
    with GatheredParameters([weight], modifier_rank=0):
        if rank() == 0:
            weight.data.fill_(2.0)
    check("modifier_rank", torch.full((42, 21), 2.0), 1)
    check("nothing", torch.full((42, 21), 2.0), 0)
    onefold.utils.safe_set_full_fp32_param(weight, torch.full((42, 21), 3.0))
    check("safe_set_full_fp32_param", torch.full((42, 21), 3.0), 1)
    local = onefold.utils.safe_get_local_fp32_param(weight)
    onefold.utils.safe_set_local_fp32_param(weight, torch.full_like(local, 4.0))
    check("safe_set_local_fp32_param", torch.full((42, 21), 4.0), 1)
    weight.ds_tensor.fill_(5.0)
    check("a write to the shard", torch.full((42, 21), 5.0), 1)
    with GatheredParameters([weight]):
        view = weight.data
    if rank() == 1:
        view.zero_()  # a copy that the program has kept, on one rank
    check("a write to a kept view", torch.full((42, 21), 5.0), 1)
    if rank() == 0:
        engine.empty_partition_cache()  # one rank alone
    check("empty_partition_cache() on one rank", torch.full((42, 21), 5.0), 1)
    with torch.no_grad():
        engine(*batches(1)[0])
    check("a forward", torch.full((42, 21), 5.0), 1)
    with GatheredParameters([engine.module.blocks[1].up.weight]):
        pass
    check("another unit", torch.full((42, 21), 5.0), 1)
    engine.offload_states()
    engine.reload_states()
    check("offload_states", torch.full((42, 21), 5.0), 1)
    return told


def test_what_was_gathered_is_not_read_after_a_change(on_ranks):
    assert on_ranks(2, changed_in_between) == [[], []]


# -- engines that share weights -------------------------------------------------------------------------------------


def over_the_same_parameters(model: nn.Module, like: nn.Module) -> nn.Module:
    """Modules of their own around the Parameter objects of others."""
    for path, module in model.named_modules():
        for name in list(module._parameters):
            module._parameters[name] = like.get_submodule(path)._parameters[name]
    return model


def without_optimizer(stage: int, dtype: str) -> dict[str, Any]:
    settings = config(stage, **precision(dtype))
    del settings["optimizer"]
    return settings


def shared(stage: int, dtype: str, between: bool) -> list[str]:
    """A LoRA policy, the base model in it as its reference, and modules of their own over the same weights.
    `between`: the references compute between the policy's forward and its backward.
    """
    told = []
    straight = start(lora(), config(stage, **precision(dtype)))
    expected = train(straight, 2)
    straight.destroy()
    policy = lora()
    with policy.disable_adapter(), torch.no_grad():
        plain = [policy.to(dict(fp32=torch.float32, bf16=torch.bfloat16)[dtype])(*batch).item() for batch in batches(2)]
    engine = start(lora(), config(stage, **precision(dtype)))
    alone = engine.model_memory.held_bytes()
    torch.manual_seed(5)
    base = peft_free(engine.module.get_base_model())
    references = {
        "base model": start(engine.module.get_base_model(), without_optimizer(stage, dtype)),
        "other modules": start(base, without_optimizer(stage, dtype)),
    }
    found: dict[str, list[float]] = {name: [] for name in references}
    losses = []
    for batch in batches(2):
        loss = engine(*batch) if between else None
        with torch.no_grad(), engine.module.disable_adapter():
            for name, reference in references.items():
                found[name].append(reference(*batch).item())
        loss = engine(*batch) if loss is None else loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    for name, reference in references.items():
        if found[name] != plain:
            told.append(f"{name}: {found[name]}, expected {plain}")
        if reference.model_memory.planned_bytes().total or reference.model_memory.held_bytes().total:
            told.append(
                f"{name} plans {reference.model_memory.planned_bytes()} and holds {reference.model_memory.held_bytes()}"
            )
    if losses != expected.losses or first_difference(weights_of(engine.module), expected.weights):
        told.append("the policy trains to something else")
    held = engine.model_memory.held_bytes()
    if (held.parameters, held.masters) != (alone.parameters, alone.masters):
        told.append(f"the policy holds {held}, alone {alone}")
    references.pop("base model").close()
    engine.backward(engine(*batches(1)[0]))
    engine.step()
    if stage < 3:  # weights that stay unsharded outlive their engine
        engine.close()
        with torch.no_grad():
            references["other modules"](*batches(1)[0])
    return told


def peft_free(model: nn.Module) -> nn.Module:
    """The base model without adapters, around the same Parameter objects."""
    plain = Policy()
    for path, module in plain.named_modules():
        source = model.get_submodule(path)
        source = source.get_base_layer() if hasattr(source, "get_base_layer") else source
        for name in list(module._parameters):
            module._parameters[name] = source._parameters[name]
    return plain


SHARERS = [(0, "bf16", False), (1, "fp32", True), (2, "bf16", False), (3, "bf16", False), (3, "fp32", True)]


def all_sharers() -> dict[Any, list[str]]:
    return {case: told for case in SHARERS if (told := shared(*case))}


def test_a_reference_over_the_policys_weights_holds_nothing(on_ranks):
    assert on_ranks(2, all_sharers) == [{}, {}]


class Valued(nn.Module):
    """A value head over a backbone."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        torch.manual_seed(7)
        self.value = nn.Linear(31, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.value(self.backbone.logits(x)).float().square().mean()


def value_head(stage: int, folder: str) -> list[str]:
    """Its own optimizer trains the head, the backbone is frozen and belongs to a reference."""
    told = []
    backbone = net()
    backbone.requires_grad_(False)
    expected = train(start(Valued(backbone), config(stage)), 3)
    backbone = net()
    backbone.requires_grad_(False)
    reference = start(backbone, without_optimizer(stage, "fp32"))
    with torch.no_grad():
        before = [reference(*batch).item() for batch in batches(2)]
    critic = start(Valued(backbone), config(stage))
    if critic.model_memory.planned_bytes().parameters >= reference.model_memory.planned_bytes().parameters:
        told.append("the critic holds the backbone again")
    told += filter(None, [first_difference(train(critic, 3), expected)])
    with torch.no_grad():
        if [reference(*batch).item() for batch in batches(2)] != before:
            told.append("the reference computes something else")
    critic.save_checkpoint(folder)
    train(critic, 1)
    critic.load_checkpoint(folder)
    told += filter(None, [first_difference(weights_of(critic.module), expected.weights)])
    reference.close()
    try:
        critic(*batches(1)[0])
        told += ["a closed reference is not noticed"] if stage == 3 else []
    except RuntimeError as error:
        told += [] if "is closed" in str(error) else [str(error)]
    return told


@pytest.mark.parametrize("stage", [more(0), 2, 3])
def test_a_value_head_over_a_shared_backbone(on_ranks, tmp_path, stage):
    assert on_ranks(2, value_head, stage, str(tmp_path)) == [[], []]


class Detached(Valued):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.value(self.backbone.logits(x).detach()).float().square().mean()


def critic_of(stage: int) -> tuple[Any, list[float]]:
    """A value head over a backbone that the policy trains meanwhile: losses and weights of the policy, and the head's
    losses.
    """
    policy = start(net(), config(stage))
    model = Detached(policy.module)
    critic = start(model, config(stage), model_parameters=model.value.parameters())
    losses, values = [], []
    for batch in batches(3):
        value = critic(*batch)
        critic.backward(value)
        critic.step()
        loss = policy(*batch)
        policy.backward(loss)
        policy.step()
        losses.append(loss.item())
        values.append(value.item())
    return [losses, weights_of(policy.module)], values


def critics_beside_policies() -> list[str | None]:
    straight = train(start(net(), config(0)), 3)
    found = [critic_of(stage) for stage in (0, 2, 3)]
    told = [first_difference(policy, [straight.losses, straight.weights]) for policy, _ in found]
    return [*told, *(first_difference(values, found[0][1]) for _, values in found)]


def test_a_value_head_over_what_the_policy_trains(on_ranks):
    assert on_ranks(2, critics_beside_policies) == [[None] * 6] * 2


def not_shared() -> list[str]:
    told = []
    policy = start(lora(), config(3, **precision("bf16")))
    for settings in (without_optimizer(3, "fp32") | {"fp16": {"enabled": True}},):
        try:
            start(policy.module.get_base_model(), settings)
        except ValueError as error:
            told.append(str(error))
    backbone = net()
    backbone.requires_grad_(False)
    reference = start(backbone, without_optimizer(3, "fp32"))
    backbone.head.weight.requires_grad_(True)
    try:
        start(Valued(backbone), config(3))
    except ValueError as error:
        told.append(str(error))
    del reference
    return told


def test_what_cannot_be_shared_is_named(on_ranks):
    for dtype, trained in on_ranks(1, not_shared):
        assert "torch.bfloat16" in dtype
        assert "belongs to another engine" in dtype
        assert "backbone.head.weight is trained here" in trained


# -- batches of any number of backwards -----------------------------------------------------------------------------

COUNTS = (3, 1, 2, 4)


def dynamic(stage: int, dtype: str, offload: bool) -> list[str]:
    """`backward` a different number of times before each step, beside plain torch that adds up the same losses."""
    zero = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    told = []
    settings = config(
        stage, **precision(dtype), optimizer={"type": "SGD", "params": {"lr": 0.1}}, zero_optimization=zero
    )
    engine, explicit = start(net(), settings), start(net(), settings)
    plain = net()
    plain.load_state_dict(weights_of(engine.module))
    for seed, count in enumerate(COUNTS):
        data = batches(count, seed=seed)
        for batch in data:
            engine.backward(engine(*batch))
        engine.step()
        for index, batch in enumerate(data):
            explicit.set_gradient_accumulation_boundary(index == count - 1)
            explicit.backward(explicit(*batch))
            explicit.step()
        losses = torch.stack([plain(*batch) for source in range(2) for batch in of_rank(source, count, seed)])
        gradients = torch.autograd.grad(losses.sum() / 2, list(plain.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    tolerance = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 4e-3}[dtype]
    for found in (weights_of(engine.module), weights_of(explicit.module)):
        for name, weight in plain.named_parameters():
            apart = (found[name].float() - weight).abs().max().item()
            if apart > tolerance:
                told.append(f"{name} is {apart} apart")
    if engine.global_steps != len(COUNTS):
        told.append(f"{engine.global_steps} steps")
    return told


def of_rank(number: int, count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of `models.batches` on another rank."""
    generator = torch.Generator().manual_seed(1000 * seed + 17 * number + 3)
    found = [torch.randint(0, 31, (4, 7), generator=generator) for _ in range(count)]
    return [(x, x.roll(-1, 1)) for x in found]


DYNAMIC = [
    (0, "fp32", False), (1, "bf16", True), (2, "fp32", False), (2, "fp16", True), (3, "bf16", False), (3, "fp32", True),
]  # fmt: skip


def all_dynamic() -> dict[Any, list[str]]:
    return {case: told for case in DYNAMIC if (told := dynamic(*case))}


def test_any_number_of_backwards_before_a_step(on_ranks):
    assert on_ranks(2, all_dynamic) == [{}, {}]


def uneven(stage: int) -> str:
    engine = start(net(), config(stage))
    try:
        for step in range(2):
            for batch in batches(1 + (rank() + step) % 2):
                engine.backward(engine(*batch))
            engine.step()
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [more(0), more(2), 3])
def test_ranks_with_different_numbers_of_backwards_are_told(own_ranks, stage):
    for told in own_ranks(2, uneven, stage):
        assert "diverged" in told
        assert "the step" in told


# -- all of it --------------------------------------------------------------------------------------------------------


def run_example(source: str) -> bool:
    exec(compile(source, "docs/rl.md", "exec"), {"__name__": "__main__"})
    return True


def test_the_example_of_the_docs_runs(own_ranks):
    page = (Path(__file__).parents[2] / "docs" / "rl.md").read_text()
    (example,) = re.findall(r"```python\n(import .*?)```", page, re.DOTALL)
    assert all(
        call in example for call in ("offload_states", "merge_adapters", "GatheredParameters", "disable_adapter")
    )
    assert own_ranks(2, run_example, example) == [True, True]
