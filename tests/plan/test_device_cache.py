"""Copies of offloaded state on the device: what gains from them, in which order, and how much fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models import config

from onefold.config import load_config
from onefold.plan import FlatParamSpec, Plan, Residency, Tier, make_plan
from onefold.plan.device_cache import assign_device_cache, cached_bytes
from onefold.plan.layout import Layout

CPU = {"device": "cpu"}


def plan_of(accumulation: int = 2, **keys: object) -> Plan:
    zero = {"offload_optimizer": CPU, "offload_param": CPU}
    settings = config(3, zero_optimization=zero, bf16={"enabled": True}, onefold=keys)
    return replace(make_plan(load_config(settings), 1), accumulates=accumulation > 1)


def specs_of(num: int, *, trainable: bool = True, given_to_device: bool = False) -> list[FlatParamSpec]:
    layout = Layout.of([("weight", (1024, 256), 0)], 1)
    where = Residency(Tier.HOST if trainable else Tier.DEVICE, Tier.HOST)
    spec = FlatParamSpec(layout, torch.bfloat16, trainable, False, residency=where, given_to_device=given_to_device)
    return [spec] * num


SIZE = 1024 * 256


def flags(specs: list[FlatParamSpec]) -> list[tuple[bool, bool]]:
    return [(spec.caches_gradient, spec.caches_parameter) for spec in specs]


def test_gradients_come_first_then_parameters_in_model_order():
    plan, specs = plan_of(), specs_of(3)
    assert flags(assign_device_cache(specs, plan, 4 * SIZE - 1)) == [(False, True), (False, False), (False, False)]
    assert flags(assign_device_cache(specs, plan, 8 * SIZE)) == [(True, False), (True, False), (False, False)]
    assert flags(assign_device_cache(specs, plan, 14 * SIZE)) == [(True, True), (True, False), (True, False)]
    assert flags(assign_device_cache(specs, plan, 18 * SIZE)) == [(True, True)] * 3


@pytest.mark.parametrize("num_bytes", [0, 1, 3 * SIZE, 7 * SIZE, 11 * SIZE, 10**9])
def test_copies_take_at_most_the_given_bytes(num_bytes):
    plan = plan_of()
    assert cached_bytes(assign_device_cache(specs_of(3), plan, num_bytes), plan) <= num_bytes


def test_a_second_assignment_replaces_the_first():
    plan, specs = plan_of(), specs_of(3)
    assert flags(assign_device_cache(assign_device_cache(specs, plan, 10**9), plan, 0)) == [(False, False)] * 3


def test_a_single_micro_step_gains_from_gradients_that_the_gpu_steps():
    specs = [*specs_of(1, given_to_device=True), *specs_of(1)]
    assert flags(assign_device_cache(specs, plan_of(1), 10**9)) == [(True, True), (False, True)]


def test_frozen_parameters_are_cached_and_nothing_that_is_on_the_device():
    on_device = [replace(spec, residency=Residency()) for spec in specs_of(1)]
    found = assign_device_cache([*specs_of(1, trainable=False), *on_device], plan_of(), 10**9)
    assert flags(found) == [(False, True), (False, False)]
