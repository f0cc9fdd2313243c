"""Parameters that rest as shards, from outside: Init, GatheredParameters, loading, saving, attributes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering
from models import Net, batches, config, first_difference, more, net, one_in, precision, rank, start, train, weights_of
from torch import nn

import onefold
from onefold.config import load_config
from onefold.runtime import handle_of, unsharded_shape
from onefold.runtime.unit_state import ParameterState
from onefold.tools.train.options import TrainOptions, prepare_config
from onefold.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
)

STAGES = [0, 1, 2, 3]


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# -- Init -------------------------------------------------------------------------------------------------------


class Parent(nn.Module):
    """Writes its children's weights in every way that people do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.extra = nn.Parameter(torch.randn(5, 3))
        self.bias = nn.Linear(7, 5)
        self.apply(self.initialise)
        nn.init.zeros_(self.bias.bias)
        self.net.head.weight.data.fill_(0.25)
        self.net.embed.weight.data = torch.full(self.net.embed.weight.shape, 0.5)
        with torch.no_grad():
            self.net.blocks[1].up.weight[0] = 7.0
            self.net.blocks[2].up.weight.copy_(self.net.blocks[0].up.weight * 2)

    def initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.net(x, y) + self.bias(self.extra.t().new_ones(2, 7)).sum() * self.extra.sum()


def built_under_init(world: int, dtype: str) -> tuple[bool, bool, str | None]:
    torch.manual_seed(5)
    plain = Parent()
    if dtype == "bf16":
        plain = plain.bfloat16()
    torch.manual_seed(5 + rank())
    with onefold.zero.Init(config_dict_or_path=config(3, **precision(dtype))):
        model = Parent()
    resting = all(p.numel() == 0 for p in model.parameters())
    shapes = [unsharded_shape(p) for p in model.parameters()] == [p.shape for p in plain.parameters()]
    whole = {name: p.clone() for name, p in plain.state_dict().items()}
    whole["net.scale"] = whole["net.scale"].float()
    return resting or world == 1, shapes, first_difference(weights_of(model), whole)


@covering(world=(1, 2, 3), dtype=("fp32", "bf16"), strength=1)
def test_init_gives_the_model_that_a_plain_constructor_gives(on_ranks, world, dtype):
    assert on_ranks(world, built_under_init, world, dtype) == [(True, True, None)] * world


def trained_after_init(dtype: str, how: str) -> tuple[str | None, bool]:
    settings = config(3, gradient_clipping=0.5, **precision(dtype))
    torch.manual_seed(5)
    plain = start(Parent(), settings)
    expected = train(plain)
    torch.manual_seed(5)
    if how == "context":
        with onefold.zero.Init(config_dict_or_path=settings), onefold.zero.Init():  # nested: the outer one serves
            model = Parent()
    else:
        model = Parent()
        onefold.zero.Init(module=model, config_dict_or_path=settings)
    engine = start(model, settings)
    return first_difference(train(engine), expected), all(p.numel() == 0 for p in model.parameters())


@covering(dtype=("fp32", "bf16"), how=("context", "module"), strength=1)
def test_a_model_built_under_init_trains_to_the_same_bits(on_ranks, how, dtype):
    assert on_ranks(2, trained_after_init, dtype, how) == [(None, True)] * 2


class Bare(nn.Module):
    """Modules with one parameter each, all of which the parent initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def crossings(alike: bool) -> tuple[list[int], list[int], str | None]:
    """Bytes that a rank sends while the model is built, and in all until there is an engine."""
    settings = config(3, **precision("bf16"))
    torch.manual_seed(5 if alike else 5 + rank())
    init = onefold.zero.Init(config_dict_or_path=settings)
    with init:
        model = Bare()
    built = [init._ledger.bytes(operation) for operation in ("broadcast", "gather")]
    engine = start(model, settings)
    ledgers = (init._ledger, engine.ledger)
    whole = [sum(ledger.bytes(operation) for ledger in ledgers) for operation in ("broadcast", "gather")]
    torch.manual_seed(5)
    plain = {name: weight.bfloat16() for name, weight in Bare().state_dict().items()}
    return built, whole, first_difference(weights_of(engine.module), plain)


@pytest.mark.parametrize("alike", [True, False])
def test_each_parameter_crosses_between_ranks_once_where_ranks_have_made_the_same(on_ranks, alike):
    num = 4 * 64 * 64
    for number, (built, whole, difference) in enumerate(on_ranks(2, crossings, alike)):
        # As they were made and as the parent initialised them, fp32 each time, from rank 0 where ranks differ.
        told = 2 * 4 * num if number == 0 and not alike else 0
        assert built == [told, 0]
        assert whole == [told, 2 * num // 2]
        assert difference is None


def overwritten_badly() -> tuple[str, str | None]:
    """A write that raises, and one of a parameter with itself, leave the values that were there."""
    torch.manual_seed(5)
    plain = nn.Linear(64, 64, bias=False).weight.detach().clone()
    torch.manual_seed(5)
    told = ""
    with onefold.zero.Init():
        holder = nn.ModuleList([nn.Linear(64, 64, bias=False)])
        weight = holder[0].weight
        try:
            with torch.no_grad():
                weight.normal_(std=-1.0)
        except RuntimeError as error:
            told = str(error)
        with torch.no_grad():
            weight.copy_(weight)
    return told, first_difference(weights_of(holder)["0.weight"], plain)


def test_an_overwrite_under_init_that_raises_loses_nothing(on_ranks):
    for told, difference in on_ranks(2, overwritten_badly):
        assert "std" in told
        assert difference is None


def not_enabled() -> bool:
    with onefold.zero.Init(enabled=False):
        model = Net()
    return all(p.numel() for p in model.parameters())


def test_init_that_is_not_enabled_does_nothing(on_ranks):
    assert on_ranks(2, not_enabled) == [True, True]


def optimizer_on_placeholders() -> str | None:
    torch.manual_seed(5)
    expected = train(start(Net(), config(3), model_parameters=None))
    torch.manual_seed(5)
    with onefold.zero.Init():
        model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    settings = config(3)
    del settings["optimizer"]
    return first_difference(train(start(model, settings, optimizer=optimizer)), expected)


def test_an_optimizer_built_on_placeholders_is_taken_in_by_identity(on_ranks):
    assert on_ranks(2, optimizer_on_placeholders) == [None, None]


def added_after_init() -> bool:
    """Adapters and resized embeddings appear after Init, and are real parameters until initialize."""
    torch.manual_seed(5)
    with onefold.zero.Init():
        model = Net()
    torch.manual_seed(9 + rank())
    model.adapter = nn.Linear(4, 4)
    first = model.adapter.weight.clone()
    engine = start(model, config(3))
    engine.backward(engine(*batches(1)[0]))
    engine.step()
    sizes = {tuple(unsharded_shape(p)) for p in model.parameters()}
    weights = weights_of(engine.module)
    return (4, 4) in sizes and (rank() != 0 or torch.allclose(weights["adapter.weight"], first, atol=1e-2))


def test_parameters_added_after_init_are_taken_in(on_ranks):
    assert on_ranks(2, added_after_init) == [True, True]


# -- GatheredParameters -----------------------------------------------------------------------------------------


def engine_of(stage: int, **more: Any) -> onefold.Engine:
    return start(net(), config(stage, **more))


def gathers(stage: int) -> list[Any]:
    engine = engine_of(stage)
    model = engine.module
    weight, found = model.head.weight, []
    reference = weights_of(model)
    with onefold.zero.GatheredParameters(weight):
        found.append(torch.equal(weight, reference["head.weight"]))
    with onefold.zero.GatheredParameters(p for p in [weight, None, torch.ones(2), model.embed.weight, weight]):
        found.append(torch.equal(model.embed.weight, reference["embed.weight"]))
    with onefold.zero.GatheredParameters([]), onefold.zero.GatheredParameters(None):
        pass
    with onefold.zero.GatheredParameters(model.parameters(), enabled=False):
        found.append(weight.numel() == 0 or stage < 3)
    # Sets come in another order on each rank.
    shuffled = list(model.parameters())
    generator = torch.Generator().manual_seed(rank())
    shuffled = [shuffled[i] for i in torch.randperm(len(shuffled), generator=generator).tolist()]
    with onefold.zero.GatheredParameters(shuffled):
        with onefold.zero.GatheredParameters(weight):  # nested
            pass
        found.append(same({k: v.clone() for k, v in model.state_dict().items()}, reference))
    found.append(weight.numel() == 0 or stage < 3)
    return found


@covering(stage=(3, 2, more(0), more(1)), world=(2, 1, 3), strength=1)
def test_gathered_parameters_takes_whatever_people_pass(on_ranks, world, stage):
    for found in on_ranks(world, gathers, stage):
        assert all(found[:2]), found
        assert found[2] or world == 1
        assert found[3]
        assert found[4] or world == 1


def written(stage: int, dtype: str) -> tuple[bool, bool]:
    """Rank 0 writes different values than the others; its values count, and the next step starts from them."""
    engine = engine_of(stage, **precision(dtype))
    model = engine.module
    with onefold.zero.GatheredParameters([model.head.weight], modifier_rank=0):
        if rank() == 0:
            model.head.weight.data.fill_(0.125)
        else:
            with torch.no_grad():
                model.head.weight.fill_(99.0)
    before = weights_of(model)["head.weight"]
    master = safe_get_full_fp32_param(model.head.weight)
    return bool((before == 0.125).all()), bool((master == 0.125).all())


@covering(stage=(3, 2, more(0), more(1)), dtype=("fp32", "bf16"), strength=1)
def test_the_modifier_ranks_values_become_everybodys(on_ranks, stage, dtype):
    assert on_ranks(2, written, stage, dtype) == [(True, True)] * 2


def lost_write(who: str) -> tuple[str, bool]:
    engine = engine_of(3)
    model = engine.module
    before = weights_of(model)
    message = ""
    try:
        with onefold.zero.GatheredParameters([model.head.weight, model.embed.weight]):
            if who == "one of two parameters" and rank() == 1:
                model.embed.weight.data[-1, -1] = 3.0
            elif who != "one" or rank() == 1:
                model.head.weight.data[-1, -1] = 3.0 + rank()
    except RuntimeError as error:
        message = str(error)
    return message, same(weights_of(model), before)


@pytest.mark.parametrize("who", ["each another", "one", "one of two parameters"])
def test_a_write_without_modifier_rank_that_ranks_do_not_share_is_refused_on_every_rank(on_ranks, who):
    for message, unchanged in on_ranks(2, lost_write, who):
        assert "modifier_rank=0" in message
        assert ("rank 1 wrote" if who == "one" else "rank 0 wrote") in message
        assert unchanged


def averaged(stage: int, dtype: str, engaged: bool) -> tuple[bool, bool, bool]:
    """An average of weights as OpenRLHF keeps it: written on every rank, without `modifier_rank`."""
    torch.manual_seed(5)
    policy = engine_of(stage, **precision(dtype))
    with onefold.zero.Init():
        average = Net()
    if engaged:
        average = start(average, config(3)).module
    expected = weights_of(average)
    for _ in range(2):
        train(policy, 1)
        news = weights_of(policy.module)
        for (name, held), new in zip(average.named_parameters(), policy.module.parameters(), strict=True):
            with onefold.zero.GatheredParameters([held, new]):
                held.data.mul_(0.9).add_(new.data.to(held.dtype), alpha=0.1)
            expected[name].mul_(0.9).add_(news[name].to(expected[name].dtype), alpha=0.1)
    kept = same(weights_of(average), expected)
    with onefold.zero.GatheredParameters(list(policy.module.parameters())):
        for parameter in policy.module.parameters():
            parameter.data.fill_(0.5)
    found = weights_of(policy.module)
    written = all(bool((found[name] == 0.5).all()) for name, _ in policy.module.named_parameters())
    masters = [safe_get_full_fp32_param(parameter) for parameter in policy.module.parameters()]
    return kept, written, all(bool((master == 0.5).all()) for master in masters)


@pytest.mark.parametrize(("stage", "dtype", "engaged"), [more(3, "fp32", False), (3, "bf16", True)])
def test_a_write_that_every_rank_makes_alike_is_kept(on_ranks, stage, dtype, engaged):
    assert on_ranks(2, averaged, stage, dtype, engaged) == [(True, True, True)] * 2


def reshaped(engaged: bool, everybody: bool) -> str:
    torch.manual_seed(5)
    with onefold.zero.Init():
        model = Net()
    engine = start(model, config(3)) if engaged else None
    try:
        with onefold.zero.GatheredParameters([model.head.weight], modifier_rank=0):
            if everybody or rank() == 0:
                model.head.weight.data = torch.ones(40, 21)
    except RuntimeError as error:
        return str(error)
    del engine
    return f"taken {tuple(model.head.weight.shape)}"


@pytest.mark.parametrize(("engaged", "everybody"), [(False, True), (False, False), (True, True), (True, False)])
def test_another_shape_is_taken_from_all_ranks_before_initialize_or_refused_on_all(on_ranks, engaged, everybody):
    for found in on_ranks(2, reshaped, engaged, everybody):
        assert found == "taken (40, 21)" if everybody and not engaged else "before initialize" in found


def initialised_late() -> list[Any]:
    """What transformers does after Init for classes that initialise their children: every rank, in place."""
    with onefold.zero.Init():
        model = Net()
    torch.manual_seed(7 + rank())
    with torch.no_grad():
        nn.init.normal_(model.head.weight, std=0.5)
        model.blocks[0].up.weight.fill_(2.0)
    torch.manual_seed(7)
    expected = torch.empty(model.head.out_features, model.head.in_features).normal_(std=0.5)
    weights = weights_of(model)
    found = [torch.equal(weights["head.weight"], expected), bool((weights["blocks.0.up.weight"] == 2).all())]
    with (
        pytest.raises(RuntimeError, match="sharded over the ranks"),
        onefold.zero.GatheredParameters(model.head.weight),
    ):
        model.blocks[0].up.weight.fill_(1.0)  # other ranks may not be here
    engine = start(model, config(3))
    with pytest.raises(RuntimeError, match="sharded over the ranks"), torch.no_grad():
        engine.module.head.weight.fill_(1.0)
    return found


def test_code_that_initialises_after_init_is_served_until_there_is_an_engine(on_ranks):
    assert on_ranks(2, initialised_late) == [[True, True]] * 2


def elsewhere() -> str:
    for accepted in (None, "none", "cpu", "nvme"):
        onefold.zero.Init(remote_device=accepted)
    try:
        onefold.zero.Init(remote_device="tape")
    except ValueError as error:
        return str(error)
    return ""


def test_shards_that_should_rest_elsewhere_are_refused_by_name(on_ranks):
    assert "remote_device 'tape'" in on_ranks(1, elsewhere)[0]


def gathered_for_good() -> tuple[bool, bool, bool]:
    engine = engine_of(3)
    model = engine.module
    reference = weights_of(model)
    onefold.zero.gather_distributed_parameters(model)
    whole = same({k: v.clone() for k, v in model.state_dict().items()}, reference)
    engine.empty_partition_cache()
    whole = whole and engine.plan.shards_parameters and model.head.weight.numel() == 0
    onefold.zero.gather_distributed_parameters(model)
    engine.backward(engine(*batches(1)[0]))
    engine.step()
    return whole, all(p.numel() == 0 for p in model.parameters()), not same(weights_of(model), reference)


def test_gather_distributed_parameters_lasts_until_training_goes_on(on_ranks):
    assert on_ranks(2, gathered_for_good) == [(True, True, True)] * 2


# -- state dicts ------------------------------------------------------------------------------------------------


def bare_state_dict() -> tuple[str, bool, list[int]]:
    engine = engine_of(3)
    try:
        engine.module.state_dict()
        message = ""
    except RuntimeError as error:
        message = str(error)
    reference = weights_of(engine.module)
    whole = engine.module_state_dict()
    fits = same(dict(whole), reference) if rank() == 0 else whole == {}
    return message, fits, [p.numel() for p in engine.module.parameters()]


def test_a_bare_state_dict_at_rest_raises_and_names_the_way(on_ranks):
    for message, fits, sizes in on_ranks(2, bare_state_dict):
        assert "module_state_dict" in message
        assert fits
        assert set(sizes) == {0}


def loaded(stage: int, dtype: str) -> tuple[bool, bool]:
    engine = engine_of(stage, **precision(dtype))
    torch.manual_seed(77)
    other = Net().to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    engine.module.load_state_dict(other.state_dict())
    fits = same(weights_of(engine.module), {k: v.clone() for k, v in other.state_dict().items()})
    return fits, torch.equal(safe_get_full_fp32_param(engine.module.head.weight), other.head.weight.float())


@covering(stage=(3, 2, more(0), more(1)), dtype=("fp32", "bf16"), strength=1)
def test_load_state_dict_gathers_and_reaches_masters(on_ranks, stage, dtype):
    assert on_ranks(2, loaded, stage, dtype) == [(True, True)] * 2


def saved(folder: str, stage: int, tied: bool, max_shard_size: str, file_name: str) -> tuple[bool, int]:
    torch.manual_seed(5)
    engine = start(Net(tied=tied), config(stage, **precision("bf16")))
    engine.backward(engine(*batches(1)[0]))
    engine.step()
    engine.save_16bit_model(folder, file_name, max_shard_size=max_shard_size)
    reference = weights_of(engine.module)
    torch.manual_seed(6)
    with onefold.zero.Init(dtype=torch.bfloat16):
        fresh = Net(tied=tied)
    if file_name.endswith(".bin"):
        fresh_engine = start(fresh, config(stage, **precision("bf16")))
        fresh_engine.module.load_state_dict(torch.load(Path(folder) / file_name, weights_only=True))
        return same(weights_of(fresh_engine.module), reference), 0
    read = onefold.zero.load_safetensors(fresh, folder)
    return same(weights_of(fresh), reference), read


@covering(
    stage=(3, 1),
    tied=(False, True),
    size=("3KB", "5GB"),
    name=("model.safetensors", "m.bin"),
    strength=1,
    where=lambda size, name, **_: size == "5GB" or name == "model.safetensors",
)
def test_saved_weights_come_back_and_each_rank_reads_its_ranges(on_ranks, tmp_path, stage, tied, size, name):
    results = on_ranks(2, saved, str(tmp_path), stage, tied, size, name)
    assert all(fits for fits, _ in results)
    if name.endswith(".safetensors"):
        stored = sum(p.numel() for p in Net(tied=tied).parameters()) * 2
        buffers = 4 * 2  # the buffer is read by both
        assert sum(read for _, read in results) == stored + buffers
        assert (tmp_path / "model.safetensors.index.json").exists() == (size == "3KB")


def streamed(stage: int, bucket_bytes: int) -> tuple[bool, list[int], int]:
    engine = start(net(tied=True), config(stage, bf16={"enabled": True}))
    train(engine, 2)
    whole = {name: value for name, value in weights_of(engine.module).items() if name != "head.weight"}
    buckets, found, most = [], {}, 0
    for bucket in onefold.zero.stream_weights(engine.module, bucket_bytes=bucket_bytes):
        buckets.append(dict(bucket))
        found |= {name: value.clone() for name, value in bucket.items()}
        open_units = [unit for unit in engine.state.schedule.units if unit.param_state is ParameterState.UNSHARDED]
        members = [member for unit in open_units for param in unit.sharded_params for member in param.layout.members]
        most = max(most, sum(2 * (member.stop - member.start) for member in members))  # padding aside
    sizes = [sum(value.nbytes for value in bucket.values()) for bucket in buckets if len(bucket) > 1]
    train(engine, 1)  # everything is at rest again
    return same(found, whole), sizes, most


@covering(stage=(3, 0), bucket_bytes=(9000, 1 << 30), strength=1)
def test_weights_are_streamed_in_buckets_with_a_cap(on_ranks, stage, bucket_bytes):
    for right, sizes, most in on_ranks(2, streamed, stage, bucket_bytes):
        assert right
        assert max(sizes) <= bucket_bytes
        assert most <= bucket_bytes, "no unit is larger"
        assert bucket_bytes == 9000 or len(sizes) == 1, "all in one"


def misfit(folder: str) -> str:
    engine = engine_of(3)
    engine.save_16bit_model(folder)
    other = Net(width=22)
    other.more = nn.Linear(2, 2)
    try:
        onefold.zero.load_safetensors(other, folder)
    except ValueError as error:
        return str(error)
    return ""


def test_what_does_not_fit_is_listed_together(on_ranks, tmp_path):
    for message in on_ranks(2, misfit, str(tmp_path)):
        assert "missing: more.weight" in message
        assert "different shape: embed.weight" in message


# -- masters, gradients and states ------------------------------------------------------------------------------


def accessed(stage: int, dtype: str) -> dict[str, Any]:
    engine = engine_of(stage, gradient_clipping=0.0, **precision(dtype))
    torch.manual_seed(5)
    plain = Net().to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    x, y = batches(1, seed=3)[0]
    torch.distributed.broadcast(x, 0)
    torch.distributed.broadcast(y, 0)
    weight = engine.module.blocks[1].up.weight
    before = [safe_get_full_grad(weight), safe_get_full_optimizer_state(weight, "nothing")]
    engine.backward(engine(x, y))
    plain(x, y).backward()
    grad = safe_get_full_grad(weight)
    local = safe_get_local_grad(weight)
    close = torch.allclose(grad, plain.blocks[1].up.weight.grad.float(), atol=2e-3)
    safe_set_full_grad(weight, torch.full_like(grad, 0.5))
    half = bool((safe_get_full_grad(weight) == 0.5).all())
    engine.step()
    momentum = safe_get_full_optimizer_state(weight, "exp_avg")
    safe_set_full_optimizer_state(weight, torch.full_like(momentum, 0.75), "exp_avg")
    again = safe_get_full_optimizer_state(weight, "exp_avg")
    safe_set_full_fp32_param(weight, torch.arange(weight_size(weight)).float().view(unsharded_shape(weight)))
    master = safe_get_full_fp32_param(weight)
    shown = weights_of(engine.module)["blocks.1.up.weight"]
    local_master = safe_get_local_fp32_param(weight)
    refused = ""
    try:
        safe_set_local_fp32_param(weight, local_master + 1)
    except ValueError as error:
        refused = str(error)
    return {
        "before": before == [None, None],
        "close": close,
        "half": half,
        "momentum": torch.allclose(momentum, torch.full_like(momentum, 0.05)),
        "again": bool((again == 0.75).all()),
        "master": torch.equal(master.flatten(), torch.arange(master.numel()).float()),
        "shown": torch.equal(shown.float(), master.to(shown.dtype).float()),
        "local": (local.numel(), local_master.numel(), safe_get_local_optimizer_state(weight, "exp_avg").numel()),
        "refused": refused,
        "numel": master.numel(),
    }


def weight_size(weight: nn.Parameter) -> int:
    return unsharded_shape(weight).numel()


@covering(stage=(3, 1, 2, more(0)), dtype=("fp32", "bf16", "fp16"), world=(2, more(1)), strength=1)
def test_masters_gradients_and_states_are_read_and_set_in_every_stage(on_ranks, world, stage, dtype):
    results = on_ranks(world, accessed, stage, dtype)
    for found in results:
        for name in ("before", "close", "half", "momentum", "again", "master", "shown"):
            assert found[name], (name, stage, dtype)
        assert bool(found["refused"]) == (stage == 0), "where masters are sharded, ranks may set their parts"
    if stage:
        for which in range(3):
            assert sum(found["local"][which] for found in results) == results[0]["numel"]


# -- what other tools read --------------------------------------------------------------------------------------


def attributes() -> dict[str, Any]:
    from onefold.compat.parameters import ZeroParamStatus, install

    install()
    engine = engine_of(3)
    weight: Any = engine.module.blocks[0].up.weight
    weight._is_hf_initialized = True
    resting = weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    weight.all_gather()
    whole = weight.ds_status == ZeroParamStatus.AVAILABLE and tuple(weight.shape) == tuple(weight.ds_shape)
    weight.partition()
    engine.backward(engine(*batches(1)[0]))
    engine.step()
    held = torch.tensor([weight.partition_numel()])
    torch.distributed.all_reduce(held)
    numbers = [p.ds_id for p in engine.module.parameters()]
    other = engine_of(2)
    hidden = other.module.blocks[0].up.weight
    return {
        "resting": resting and weight.ds_status != ZeroParamStatus.AVAILABLE,
        "whole": whole,
        "held": int(held) == weight.ds_numel == 42 * 21,
        "unique": len(set(numbers)) == len(numbers),
        "numbers": numbers,
        "kept": weight._is_hf_initialized,
        "summary": weight.ds_summary()["ds_shape"] == (42, 21),
        "hidden": hasattr(hidden, "ds_shape") or handle_of(hidden) is None,
    }


def test_other_tools_find_their_attributes(on_ranks):
    results = on_ranks(2, attributes)
    numbers = results[0]["numbers"]
    for found in results:
        assert found.pop("numbers") == numbers
        assert not found.pop("hidden")
        assert all(found.values()), found


# -- memory while building --------------------------------------------------------------------------------------

BUILD = """
import re, sys
import subprocess
import sys
from pathlib import Path
import torch, onefold
from onefold.tools.train.gpt import GPT, PRESETS

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1))

torch.set_num_threads(1)
onefold.init_distributed()
with onefold.zero.Init():
    torch.nn.Linear(512, 512)
with torch.device("meta"):
    plain = GPT(PRESETS["120m"])
unit = sum(p.numel() for p in plain.blocks[0].parameters())
before = peak()
with onefold.zero.Init():
    model = GPT(PRESETS["120m"])
built = peak() - before
assert all(p.numel() == 0 for p in model.parameters())
found = f"{4 * plain.num_parameters()} {4 * unit} {built}"
Path(sys.argv[1], str(torch.distributed.get_rank())).write_text(found)
"""


@pytest.mark.program
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of a process from /proc")
def test_building_takes_a_shard_and_a_few_units(tmp_path):
    """A real process a rank, and its high-water mark: 120M parameters over two ranks."""
    script = tmp_path / "build.py"
    script.write_text(BUILD)
    command = [sys.executable, "-m", "onefold.tools.cli.main", "launch", "--nproc", "2", str(script), str(tmp_path)]
    # What is freed goes back to the system at once, so that the mark shows what is held.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0, done.stderr
    for index in ("0", "1"):
        whole, unit, built = (int(number) for number in (tmp_path / index).read_text().split())
        assert whole > 4 * 110_000_000
        assert built < whole / 2 + 3 * unit, (whole, unit, built)


# -- parameters of other modules --------------------------------------------------------------------------------


class Borrower(nn.Module):
    """Uses a weight that it keeps in a list, where no attribute is read."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.kept = [weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.kept[0].t()


class WithBorrower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.borrower = Borrower(self.blocks[1].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.borrower(x).square().mean()


def borrowed(stage: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    model = WithBorrower()
    limits = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    onefold.zero.register_external_parameter(model.borrower, model.blocks[1].weight)
    engine = start(model, config(stage, zero_optimization=limits))
    for step in range(3):
        engine.backward(engine(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))))
        engine.step()
    return weights_of(engine.module)


def test_an_external_parameter_kept_out_of_sight_is_found_when_registered(on_ranks):
    for mine, expected in zip(on_ranks(2, borrowed, 3), on_ranks(2, borrowed, 2), strict=True):
        assert same(mine, expected)


# -- the shipped configs ----------------------------------------------------------------------------------------

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
SHIPPED = sorted(
    {path for kind in ("zero3", "zero-plus-plus", "offload", "infinity") for path in CONFIGS.glob(f"*{kind}*")}
)


def runs_shipped(path: str, folder: str) -> tuple[bool, bool]:
    prepared = prepare_config(TrainOptions(config=path, steps=10), on_gpus=False)
    for section in ("offload_optimizer", "offload_param"):
        offload = prepared.document.get("zero_optimization", {}).get(section)
        if isinstance(offload, dict) and "nvme_path" in offload:
            several = isinstance(offload["nvme_path"], list)
            offload["nvme_path"] = [f"{folder}/{n}" for n in range(len(offload["nvme_path"]))] if several else folder
    for name in ("zero_hpz_partition_size", "mics_shard_size"):  # written for hosts of eight
        if name in prepared.document["zero_optimization"]:
            prepared.document["zero_optimization"][name] = 2
    engine = start(net(), prepared.document)
    first = engine(*batches(1)[0]).item()
    for _ in range(3 * engine.batch.accumulation):
        loss = engine(*batches(1)[0])
        engine.backward(loss)
        engine.step()
    sharded = engine.plan.shards_parameters == (engine.plan.stage == 3)
    # A schedule that begins at a rate of 0 has hardly moved yet.
    learns = loss.item() < first + (1e-2 if engine.lr_scheduler is not None else 0.0)
    result = learns, sharded
    engine.destroy()
    return result


@pytest.mark.parametrize("path", one_in(5, SHIPPED), ids=lambda path: path.name)
def test_shipped_configs_run(on_ranks, path, tmp_path):
    config = load_config(path)
    fixed = (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps)
    world = fixed[0] // (fixed[1] * fixed[2]) if all(fixed) else 2
    assert on_ranks(world, runs_shipped, str(path), str(tmp_path)) == [(True, True)] * world
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def states_of_a_shard_of_padding(stage: int, optimizer: str) -> list[object]:
    """The model is smaller than a shard: the second rank has nothing but padding."""
    torch.manual_seed(0)
    params = {"lr": 0.1, "momentum": 0.9}
    engine = start(nn.Linear(8, 8), config(stage, optimizer={"type": optimizer, "params": params}))
    for step in range(2):
        engine.backward(engine(torch.full((2, 8), 1.0 + step)).square().mean())
        engine.step()
    weight = engine.module.weight
    found: list[object] = []
    for name in ("exp_avg", "momentum_buffer", "nothing"):
        state = safe_get_full_optimizer_state(weight, name)
        found.append(None if state is None else tuple(state.shape))
    try:
        safe_set_full_optimizer_state(weight, torch.zeros(8, 8), "nothing")
    except ValueError as error:
        found.append("nothing" in str(error))
    return found


@pytest.mark.parametrize(("stage", "optimizer"), [(1, "SGD"), (3, "RMSprop"), more(2, "RMSprop"), more(3, "SGD")])
def test_ranks_agree_on_a_state_that_the_optimizer_does_not_have(on_ranks, stage, optimizer):
    assert on_ranks(2, states_of_a_shard_of_padding, stage, optimizer) == [[None, (8, 8), None, True]] * 2
