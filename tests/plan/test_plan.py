"""The table, the layout and the cut: pure decisions, no process group."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from onefold.config import ConfigError, load_config
from onefold.plan import Layout, Placement, StateSpec, Tier, Wire, cut, make_plan, plan_every_stage
from onefold.plan.traffic import OffloadedStepSplit, is_streamed
from onefold.report.describe import describe_placement
from onefold.runtime.build import plan_units

EXAMPLES = Path(__file__).parents[2] / "examples" / "configs"
R, S = Placement.REPLICATED, Placement.SHARDED


@pytest.mark.parametrize(("stage", "row"), [(0, (R, R, R)), (1, (R, R, S)), (2, (R, S, S)), (3, (S, S, S))])
def test_each_stage_is_a_row(stage, row):
    plan = make_plan(load_config({"zero_optimization": {"stage": stage}}), 8)
    assert (plan.parameters.placement, plan.gradients.placement, plan.states.placement) == row
    assert {plan.parameters.tier, plan.gradients.tier, plan.states.tier} == {Tier.DEVICE}


def test_offload_and_wires_change_columns():
    plan = make_plan(
        load_config(
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "cpu"},
                    "offload_param": {"device": "nvme", "nvme_path": "/tmp"},
                    "zero_quantized_weights": True,
                    "zero_quantized_gradients": True,
                    "zero_hpz_partition_size": 8,
                }
            }
        ),
        8,
    )
    assert plan.states.tier is Tier.HOST
    assert plan.gradients.tier is Tier.HOST
    assert plan.parameters.tier is Tier.NVME
    assert plan.parameters.wire is Wire.INT8
    assert plan.gradients.wire is Wire.INT4
    assert plan.node_shard_size == 8


@pytest.mark.parametrize(("stage", "overlaps"), [(0, False), (1, False), (2, False), (3, True)])
def test_collectives_overlap_by_default_where_parameters_are_sharded(stage, overlaps):
    for asked, expected in ((None, overlaps), (True, True), (False, False)):
        keys = {"stage": stage, "overlap_comm": asked, "stage3_prefetch_bucket_size": 77}
        plan = make_plan(load_config({"zero_optimization": keys}), 8)
        assert plan.overlap == expected
        # Nothing is gathered ahead of its use where every collective is finished where it is started.
        assert plan.limits.prefetch == (77 if expected else 0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("device", "tier"), [("none", Tier.DEVICE), ("cpu", Tier.HOST), ("nvme", Tier.NVME)])
def test_offload_puts_each_kind_of_state_into_its_tier(stage, device, tier):
    offload = {"device": device, **({"nvme_path": "/tmp"} if device == "nvme" else {})}
    keys = {"stage": stage, **({"offload_optimizer": offload} if stage else {}), "offload_param": offload}
    if stage < 3:
        del keys["offload_param"]
    plan = make_plan(load_config({"zero_optimization": keys}), 8)
    assert plan.parameters.tier is (tier if stage == 3 else Tier.DEVICE)
    assert plan.states.tier is (tier if stage else Tier.DEVICE)
    # Gradients go to the host, which steps, wherever below the device the states rest.
    below = bool(stage) and tier is not Tier.DEVICE
    assert plan.gradients.tier is (Tier.HOST if below else Tier.DEVICE)
    assert plan.gradients.placement is (S if stage >= 2 or below else R)


D, H, N = Tier.DEVICE, Tier.HOST, Tier.NVME
# What each example says of itself: its stage, and where parameters, gradients and states rest.
DESCRIBED = {
    "accelerate-offload.yaml": (2, (D, H, H)),
    "bf16.json": (0, (D, D, D)),
    "fp16.json": (0, (D, D, D)),
    "full-zero3-offload.json": (3, (H, H, H)),
    "infinity-nvme.json": (3, (N, H, N)),
    "infinity-two-drives.json": (3, (N, H, N)),
    "infinity.json": (3, (N, H, H)),
    "offload-cpu-buffers.json": (2, (D, H, H)),
    "offload-cpu-minimal.json": (2, (D, H, H)),
    "offload-cpu.json": (2, (D, H, H)),
    "offload-ratio-auto.json": (2, (D, H, H)),
    "verbose.json": (0, (D, D, D)),
    "zero3-offload-fp16.json": (3, (H, H, H)),
    "zero3-offload.json": (3, (H, H, H)),
    "zero3-tight-memory.json": (3, (H, H, H)),
    "accelerate-accumulation.yaml": (2, (D, D, D)),
    "zero-plus-plus-loco.json": (3, (D, D, D)),
    "zero-plus-plus.json": (3, (D, D, D)),
}  # All others are named after their stage and keep everything on the device.
WIRES = {
    "zero-plus-plus-loco.json": (Wire.NATIVE, Wire.INT4, 1, 16),
    "zero-plus-plus.json": (Wire.INT8, Wire.INT4, 8, 16),
    "zero3-mics.json": (Wire.NATIVE, Wire.NATIVE, 1, 8),
}


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_every_example_gives_the_plan_it_describes(path):
    named = re.match(r"(accelerate-)?zero(\d)", path.name)
    stage, tiers = DESCRIBED[path.name] if path.name in DESCRIBED or not named else (int(named[2]), (D, D, D))
    plan = make_plan(load_config(path), 16)
    parts = (plan.parameters, plan.gradients, plan.states)
    rows = {0: (R, R, R), 1: (R, R, S), 2: (R, S, S), 3: (S, S, S)}
    assert tuple(part.placement for part in parts) == rows[stage]
    assert tuple(part.tier for part in parts) == tiers
    wires = (plan.parameters.wire, plan.gradients.wire, plan.node_shard_size, plan.num_shards)
    assert wires == WIRES.get(path.name, (Wire.NATIVE, Wire.NATIVE, 1, 16))


def test_groups_of_ranks_hold_shards_in_stage_3_only():
    plans = plan_every_stage(load_config({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}), 8)
    assert [(plan.num_shards, plan.num_replicas) for plan in plans.values()] == [(8, 1), (8, 1), (8, 1), (2, 4)]


def test_the_placement_of_a_plan_is_described():
    words = "\n".join(describe_placement(make_plan(load_config({"zero_optimization": {"stage": 2}}), 8)))
    assert "replicated: every rank holds all of them" in words
    assert "sharded after every micro-step" in words
    assert "every rank holds and steps its own part" in words


def test_a_layout_covers_every_parameter_once():
    layout = Layout.of([("a", (3, 5), 1), ("b", (), 0), ("c", (0,), 0), ("d", (130,), 1)], num_shards=3)
    assert [member.name for member in layout.members] == ["b", "c", "a", "d"]
    assert all(member.start % 64 == 0 for member in layout.members)
    assert layout.total % (3 * 2048) == 0
    ends = 0
    for member in layout.members:
        assert member.start >= ends
        ends = member.stop
    assert layout.numel == 15 + 1 + 130


def test_segments_of_all_shards_are_the_group_ranges():
    layout = Layout.of([("a", (5000,), 0), ("b", (3000,), 1), ("c", (100,), 2)], num_shards=4)
    for group_range in layout.group_ranges:
        covered = []
        for rank in range(4):
            covered += [
                (segment.start, segment.stop)
                for segment in layout.segments(*layout.shard_range(rank))
                if segment.group == group_range.group
            ]
        assert covered[0][0] == group_range.start
        assert covered[-1][1] == group_range.stop
        for (_, stop), (start, _) in pairwise(covered):
            assert stop == start


def test_a_group_begins_and_ends_where_vector_kernels_meet_no_tail():
    layout = Layout.of([("a", (130,), 0), ("b", (7,), 0), ("c", (65,), 1), ("d", (3, 3), 2)], num_shards=2)
    assert [(each.group, each.start, each.stop) for each in layout.group_ranges] == [
        (0, 0, 512),
        (1, 512, 768),
        (2, 768, 1024),
    ]


def test_a_layout_of_nothing_is_empty():
    layout = Layout.of([("a", (0,), 0)], num_shards=2)
    assert layout.total == 0
    assert list(layout.segments(0, 0)) == []


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1 << 15, 64)
        self.layers = nn.ModuleList(Expert() for _ in range(2))
        self.norm = nn.LayerNorm(4)


def test_repeated_blocks_large_modules_and_the_rest():
    units = cut(Model())
    assert [unit.module for unit in units] == ["", "embed", "layers.0", "layers.1"]
    assert units[0].parameters == ("norm.weight", "norm.bias")
    assert len(units[2].parameters) == 6  # experts stay inside their block


def test_explicit_names_win():
    assert [unit.module for unit in cut(Model(), ["Linear"])][:2] == ["", "embed"]
    assert len(cut(Model(), ["Linear"])) == 2 + 6
    assert [unit.module for unit in cut(Model(), ["layers.0"])] == ["", "embed", "layers.0"]
    with pytest.raises(ConfigError, match=r"onefold.units.*'Blok'.*Expert"):
        cut(Model(), ["Blok"])


def test_hugging_face_classes_are_units():
    model = Model()
    model._no_split_modules = ["Expert"]
    assert [unit.module for unit in cut(model)] == ["", "embed", "layers.0", "layers.1"]


def test_shared_parameters_belong_to_the_root():
    model = Model()
    model.layers[0].experts[0].weight = model.layers[1].experts[0].weight
    units = {unit.module: unit for unit in cut(model)}
    assert "layers.0.experts.0.weight" in units[""].parameters
    assert units[""].has_tied
    assert not units["layers.0"].has_tied


def test_the_cut_names_every_parameter_once():
    model = Model()
    names = [name for unit in cut(model) for name in unit.parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


# -- who steps what rests below the device ---------------------------------------------------------------------------


@given(st.lists(st.integers(0, 10**6), max_size=50))
def test_the_device_is_given_its_share(sizes):
    """Never further from it than by one unit."""
    split, device, host = OffloadedStepSplit(), 0, 0
    for size in sizes:
        if split.assign(size):
            device += size
        else:
            host += size
        assert abs(device - OffloadedStepSplit.SHARE * (device + host)) <= max(sizes)


def units_given(stage: int, world: int, own: dict[str, Any], **zero: Any) -> dict[str, bool]:
    """Which parameters pass through a device."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64 * (1 + number % 3)), nn.ReLU()) for number in range(7)))
    below = {"offload_optimizer": {"device": "cpu", **zero}} if stage else {}
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, **below}, "onefold": own}
    plan = make_plan(load_config(config), world)
    groups = {id(parameter): 0 for parameter in model.parameters()}
    specs = plan_units(model, plan, groups, [StateSpec(("exp_avg", "exp_avg_sq"))])
    return {
        member.name: is_streamed(plan, spec) for unit in specs for spec in unit.params for member in spec.layout.members
    }


def test_who_steps_a_unit_depends_on_neither_stage_nor_ranks():
    wanted = units_given(1, 1, {})
    assert {True, False} == set(wanted.values())
    for stage in (1, 2, 3):
        for world in (1, 2, 8):
            assert units_given(stage, world, {}) == wanted


@pytest.mark.parametrize(
    ("own", "zero", "shares"),
    [
        ({}, {}, {True, False}),
        ({"offloaded_step": "both"}, {"pin_memory": False}, {True, False}),
        ({"offloaded_step": "host"}, {}, {False}),
        ({"offloaded_step": "device"}, {}, {True}),
        ({}, {"pin_memory": False}, {False}),
        ({"state_dtype": "int8"}, {}, {True}),
        ({"state_dtype": "int8"}, {"pin_memory": False}, {True}),
        ({"master_dtype": "bf16_int16", "offloaded_step": "both"}, {}, {True, False}),
        ({"delayed_host_step": True}, {}, {False}),
    ],
)
def test_who_steps_is_what_the_keys_say(own, zero, shares):
    assert set(units_given(2, 2, own, **zero).values()) == shares
