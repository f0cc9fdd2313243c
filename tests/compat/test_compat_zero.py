"""Sharded parameters, optimizers and checkpoints as DeepSpeed's programs look at them."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import batches, config, net, rank, start
from onefold.compat.deepspeed.accelerator import get_accelerator
from onefold.compat.deepspeed.checkpoint import ds_to_universal
from onefold.compat.deepspeed.ops.op_builder import CPUAdamBuilder, QuantizerBuilder
from onefold.compat.deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from onefold.compat.deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from onefold.compat.deepspeed.runtime.zero import partition_parameters
from onefold.compat.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from onefold.compat.deepspeed.runtime.zero.stage_1_and_2 import split_half_float_double
from onefold.compat.deepspeed.runtime.zero.tiling import TiledLinear
from onefold.compat.deepspeed.utils.torch import required_torch_version
from onefold.compat.deepspeed.utils.zero_to_fp32 import to_torch_tensor
from test_offload_cases import host_held
from torch import nn

from onefold.compat import deepspeed
from onefold.compat.deepspeed import utils
from onefold.utils import safe_get_full_fp32_param, safe_get_local_fp32_param, safe_set_local_fp32_param

# -- without ranks -----------------------------------------------------------------------------------------------------


def test_leaf_helpers_are_functions_whatever_was_imported_before():
    model = nn.Linear(2, 2)
    assert not utils.z3_leaf_module(model)
    importlib.import_module("onefold.compat.deepspeed.utils.z3_leaf_module")  # from now on the package's attribute
    utils.set_z3_leaf_modules(model, [nn.Linear])
    assert utils.z3_leaf_module(model)


@pytest.mark.parametrize(("columns", "rows"), [(1, 1), (2, 3), (5, 5)])
def test_tiles_say_where_they_begin_and_end(columns, rows):
    whole = nn.Linear(8, 10)
    tiled = TiledLinear(8, 10, in_splits=columns, out_splits=rows, init_linear=whole)
    assert (len(tiled.in_parts), len(tiled.out_parts)) == (columns + 1, rows + 1)
    for row, (top, bottom) in enumerate(zip(tiled.out_parts, tiled.out_parts[1:], strict=False)):
        for column, (left, right) in enumerate(zip(tiled.in_parts, tiled.in_parts[1:], strict=False)):
            tile: Any = tiled.linears[row][column]  # type: ignore[index]
            assert torch.equal(tile.weight, whole.weight[top:bottom, left:right])


@pytest.mark.parametrize(("columns", "rows"), [(1, 1), (2, 3), (5, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_tiles_compute_what_the_whole_layer_does(columns, rows, bias):
    whole, x = nn.Linear(8, 10, bias=bias), torch.randn(3, 8)
    tiled = TiledLinear(8, 10, bias=bias, in_splits=columns, out_splits=rows, init_linear=whole)
    assert torch.allclose(tiled(x), whole(x), atol=1e-6)


def test_a_group_of_one_rank_beside_a_launcher_of_several_is_an_error():
    check = partition_parameters._contradicting_single_rank_pg_error
    assert "WORLD_SIZE=8" in (check(1, None, {"WORLD_SIZE": "8"}) or "")
    for size, group, environment in [(8, None, "8"), (1, object(), "8"), (1, None, "1"), (1, None, ""), (1, None, "x")]:
        assert check(size, group, {"WORLD_SIZE": environment}) is None


def constructor_replaced_as_by_transformers() -> list[Any]:
    """transformers 5.23 replaces DeepSpeed's wrapper of tensor constructors while it builds a model."""
    original = partition_parameters.zero_wrapper_for_fp_tensor_constructor

    def without_arange(fn: Any, *args: Any, **kwargs: Any) -> Any:
        return fn if fn is partition_parameters._orig_torch_arange else original(fn, *args, **kwargs)

    partition_parameters.zero_wrapper_for_fp_tensor_constructor = without_arange
    try:
        with partition_parameters.Init(dtype=torch.bfloat16):
            model = nn.Linear(4, 4)
            made = torch.arange(4, dtype=torch.float32)
    finally:
        partition_parameters.zero_wrapper_for_fp_tensor_constructor = original
    cast = original(torch.ones, target_fp_dtype=torch.bfloat16, target_device=None)
    return [made.dtype, model.weight.dtype, model.weight.numel(), cast(2).dtype, cast(2, dtype=torch.int64).dtype]


def test_the_wrapper_of_tensor_constructors_can_be_replaced(on_ranks):
    assert on_ranks(1, constructor_replaced_as_by_transformers) == [
        [torch.float32, torch.bfloat16, 0, torch.bfloat16, torch.int64]
    ]


def test_dense_tensors_by_dtype():
    found = [torch.zeros(2, dtype=dtype) for dtype in (torch.float16, torch.float32, torch.bfloat16)]
    assert [len(bucket) for bucket in split_half_float_double([*found, found[1].to_sparse()])] == [1, 1, 1]


def test_names_of_one_tensor_stay_names_of_one():
    weight = torch.arange(4.0)
    made = to_torch_tensor({"a": weight, "b": weight, "mask": weight > 1}, dtype="bf16")
    assert made["a"] is made["b"]
    assert (made["a"].dtype, made["mask"].dtype) == (torch.bfloat16, torch.bool)
    with pytest.raises(ValueError, match="Unsupported output dtype 'int8'"):
        to_torch_tensor({"a": weight}, dtype="int8")


def test_versions_and_operators():
    assert required_torch_version(min_version=1.4)
    assert not required_torch_version(max_version=1.4)
    assert CPUAdamBuilder().is_compatible()
    assert not QuantizerBuilder().is_compatible()
    with pytest.raises(NotImplementedError, match="has no operator"):
        CPUAdamBuilder().load()


def test_devices_of_a_cpu_are_the_ranks_that_a_launcher_has_started(monkeypatch):
    if get_accelerator().device_name() == "cpu":
        monkeypatch.setenv("LOCAL_SIZE", "4")
        assert get_accelerator().device_count() == 4


def test_only_a_checkpoint_of_ours_is_universal_already(tmp_path):
    with pytest.raises(ValueError, match="import-deepspeed"):
        ds_to_universal.main(SimpleNamespace(input_folder=tmp_path, output_folder=tmp_path / "out"))


# -- on ranks ----------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.empty = nn.Parameter(torch.empty(0, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.inner(x))).float().square().mean() + (x @ self.empty.t()).sum()


def engine_of(stage: int, **config: Any) -> Any:
    torch.manual_seed(3)
    model = Model()
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8},
        **config,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]


def train(engine: Any, *, steps: int = 2, dtype: torch.dtype = torch.float32) -> None:
    for step in range(steps):
        torch.manual_seed(10 * step + dist.get_rank())
        engine.backward(engine(torch.randn(2, 8, dtype=dtype)))
        engine.step()


def built_in_nested_contexts() -> list[Any]:
    with partition_parameters.Init():
        with partition_parameters.Init():
            inner = nn.Linear(4, 4)
        seen = hasattr(inner.weight, "ds_id")
        outer = nn.Linear(4, 4)
        early = hasattr(outer.weight, "ds_id")
    with partition_parameters.GatheredParameters(outer.weight):
        whole = outer.weight.numel()
    return [seen, early, outer.weight.ds_status == ZeroParamStatus.NOT_AVAILABLE, outer.weight.numel(), whole]  # type: ignore[attr-defined]


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_an_inner_context_built_is_sharded_when_it_ends_on_one_rank_too(on_ranks, world_size):
    assert on_ranks(world_size, built_in_nested_contexts) == [[True, False, True, 0, 16]] * world_size


def statuses() -> dict[str, Any]:
    engine = engine_of(3)
    train(engine)
    found = {
        name: (parameter.ds_persist, parameter.ds_status.name)
        for name, parameter in engine.module.named_parameters()
        if hasattr(parameter, "ds_id")
    }
    gathered = [parameter for parameter in engine.module.parameters() if hasattr(parameter, "ds_id")]
    gathered[0].all_gather_coalesced(gathered).wait()
    whole = [parameter.numel() == parameter.ds_numel for parameter in gathered]
    for parameter in gathered:
        parameter.partition()
    return {**found, "whole": all(whole), "after": gathered[0].ds_status.name}


def test_persistent_parameters_are_available_and_empty_ones_have_no_shards(on_ranks):
    for found in on_ranks(2, statuses):
        assert found == {
            "inner.weight": (False, "NOT_AVAILABLE"), "inner.bias": (True, "AVAILABLE"),
            "head.weight": (False, "NOT_AVAILABLE"), "head.bias": (True, "AVAILABLE"),
            "whole": True, "after": "NOT_AVAILABLE",
        }  # fmt: skip


def looked_at(stage: int) -> dict[str, Any]:
    engine = engine_of(stage, bf16={"enabled": True})
    optimizer = engine.optimizer
    engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)))
    norms = torch.stack(optimizer._get_norm_groups())
    full = [utils.safe_get_full_grad(parameter) for parameter in engine.parameters() if parameter.ndim]
    expected = torch.cat([grad.flatten() for grad in full if grad is not None]).norm()
    utils.safe_update_full_grad_vectorized(list(engine.parameters()), lambda grad, _: torch.zeros_like(grad))
    zeroed = [float(part.abs().sum()) for part in optimizer.averaged_gradients[0]]
    engine.step()
    masters = optimizer.fp32_partitioned_groups_flat
    states = [optimizer.state[master] for master in masters]
    return {
        "norm": bool(torch.allclose(norms.norm(), expected, rtol=1e-4)),
        "zeroed": sum(zeroed),
        "steps": {state["step"] for state in states if state} | {optimizer.state[engine.module.head.weight]["step"]},
        "sizes": all(state["exp_avg"].shape == m.shape for m, state in zip(masters, states, strict=True) if state),
        "kept": {"zero_stage", "partition_count", "loss_scale"} <= {*optimizer.state_dict()},
        "kinds": (isinstance(optimizer, FP16_Optimizer), isinstance(optimizer, BF16_Optimizer)),
        "window": (optimizer.micro_step_id, optimizer._epilogue_ran_this_backward),
        "scaler": optimizer.needs_scaler(),
    }


def looked_at_early() -> list[bool]:
    """Masters and 16-bit slices that are read right after a step, which the host has not taken yet."""
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True}
    engine = engine_of(2, bf16={"enabled": True}, zero_optimization=zero)
    optimizer, found = engine.optimizer, []
    for read in (
        lambda: optimizer.fp32_partitioned_groups_flat,
        lambda: [part for parts in optimizer.parallel_partitioned_bit16_groups for part in parts],
    ):
        with host_held() as go:
            engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)))
            engine.step()
            threading.Timer(0.3, go.set).start()
            early = [flat.clone() for flat in read()]
        engine.wait_for_step()
        found.append(all(torch.equal(one, other) for one, other in zip(early, read(), strict=True)))
    engine.destroy()
    return found


def test_an_optimizer_shows_what_the_host_has_stepped(on_ranks):
    assert on_ranks(1, looked_at_early) == [[True, True]]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_optimizer_shows_gradients_and_states(on_ranks, stage):
    for found in on_ranks(2, looked_at, stage):
        assert found == {
            "norm": True, "zeroed": 0.0, "steps": {1}, "sizes": True, "kept": True,
            "kinds": (stage == 0, stage == 1), "window": (0, False), "scaler": False,
        }  # fmt: skip


def refusals(folder: str) -> list[str]:
    engine = engine_of(1, checkpoint={"tag_validation": "Fail"}, fp16={"enabled": True})
    found = []
    for wrong in (
        lambda: engine.save_checkpoint(folder, tag=f"tag{dist.get_rank()}"),
        lambda: engine.scale(torch.ones(2)),
        lambda: engine(torch.ones(2, 8, dtype=torch.float16)).backward(),
    ):
        with pytest.raises((AssertionError, RuntimeError)) as raised:
            wrong()
        found.append(f"{isinstance(raised.value, AssertionError)} {raised.value}")
    return found


def test_errors_are_of_the_kinds_that_programs_catch(on_ranks, tmp_path):
    for tags, scale, backward in on_ranks(2, refusals, str(tmp_path)):
        assert tags.startswith("True ")
        assert "tag_validation" in tags
        assert scale.startswith("True ")
        assert "scalar loss" in scale
        assert "Loss scaling is required" in backward


def saved(folder: str) -> None:
    engine = engine_of(3)
    train(engine)
    engine.save_checkpoint(folder, tag="one")
    if dist.get_rank() == 0:
        arguments = SimpleNamespace(input_folder=f"{folder}/one", output_folder=f"{folder}/one_universal")
        ds_to_universal.main(arguments)
        shutil.rmtree(f"{folder}/one")
    dist.barrier()


def loaded(folder: str) -> int:
    engine = engine_of(1, checkpoint={"load_universal": True})
    engine.load_checkpoint(folder, tag="one_universal")
    train(engine, steps=1)
    return int(engine.global_steps)


def test_a_universal_checkpoint_is_the_same_one_under_a_second_name(on_ranks, tmp_path: Path):
    on_ranks(2, saved, str(tmp_path))
    assert on_ranks(1, loaded, str(tmp_path)) == [3]


def local_parts(stage: int, more: dict[str, Any]) -> tuple[bool, bool, list[float]]:
    """Every rank sets its part of a parameter that stays unsharded: all have all parts."""
    settings = config(stage, zero_optimization={"stage3_param_persistence_threshold": 10**6}, **more)
    engine = start(net(), settings)
    weight = engine.module.head.weight
    part = safe_get_local_fp32_param(weight)
    safe_set_local_fp32_param(weight, torch.full_like(part, 3.0 + rank()))
    whole = safe_get_full_fp32_param(weight)
    ours = int((whole == 3.0 + rank()).sum()) == part.numel()
    return ours, torch.equal(whole.to(weight.dtype), weight.detach()), whole.unique().tolist()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True}}])
def test_parts_of_a_parameter_that_stays_unsharded_are_set_by_all_ranks(on_ranks, stage, more):
    found = on_ranks(2, local_parts, stage, more)
    assert [row[:2] for row in found] == [(True, True)] * 2
    assert found[0][2] == found[1][2]


def gradient_before_its_reduction() -> float:
    engine = start(net(), config(0, gradient_accumulation_steps=2))
    plain = net()
    plain.load_state_dict(engine.module.state_dict())
    ((x, y),) = batches(1)
    with engine.no_sync():
        engine.backward(engine(x, y))
        found = utils.safe_get_full_grad(engine.module.head.weight)
    (plain(x, y) / 2).backward()
    return (found - plain.head.weight.grad).abs().max().item()


def test_inside_no_sync_a_gradient_is_what_this_rank_has_accumulated(on_ranks):
    assert max(on_ranks(2, gradient_before_its_reduction)) < 1e-6


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, *, both: bool) -> torch.Tensor:
        return self.a(x).sum() + (self.b(x).sum() if both else 0)


def gradient_of_another_window() -> bool:
    engine = start(Two(), config(1, gradient_accumulation_steps=2))
    for both in (True, True, False):
        engine.backward(engine(torch.ones(1, 4), both=both))
        engine.step()
    return utils.safe_get_full_grad(engine.module.b.weight) is None


def test_a_gradient_that_has_not_come_in_this_window_is_none(on_ranks):
    assert on_ranks(2, gradient_of_another_window) == [True, True]


def states_set() -> str:
    engine = deepspeed.initialize(model=nn.Linear(4, 4), config=config(1))[0]
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    (states,) = [found for found in engine.optimizer.state.values() if found] or [{}]
    if not states:  # this rank's shard is all padding
        return "nothing here"
    states["exp_avg"] = states["exp_avg"].clone()  # what changes nothing is let through
    try:
        states["exp_avg"] = states["exp_avg"] + 1
    except TypeError as error:
        return str(error)
    return ""


def test_a_state_that_is_set_where_it_would_be_lost_is_refused(on_ranks):
    found = on_ranks(2, states_set)
    assert "safe_set_full_optimizer_state" in found[0]
    assert all(found)


@pytest.mark.program
def test_parameters_have_deepspeeds_attributes_only_through_its_name():
    code = (
        "import sys, torch, onefold\n"
        "config = {'train_batch_size': 1, 'log_level': 'warning', 'zero_optimization': {'stage': 3},\n"
        "    'optimizer': {'type': 'AdamW'}}\n"
        "def added(initialize):\n"
        "    model = torch.nn.Linear(4, 4)\n"
        "    before = set(vars(model.weight))\n"
        "    engine = initialize(model=model, config=config)[0]\n"
        "    return {name for name in vars(model.weight) if not name.startswith('_')} - before\n"
        "with onefold.zero.Init():\n"
        "    built = torch.nn.Linear(4, 4)\n"
        "assert not [name for name in vars(built.weight) if name.startswith('ds_')]\n"
        "assert not added(onefold.initialize)\n"
        "assert not [name for name in sys.modules if name.startswith('onefold.compat')]\n"
        "from onefold.compat import deepspeed\n"
        "assert {'ds_id', 'ds_numel', 'ds_shape', 'ds_status', 'ds_tensor'} <= added(deepspeed.initialize)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
