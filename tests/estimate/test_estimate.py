"""What is said before a run is what the run does: traffic to the byte, states to the byte, memory as tensors live."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering
from models import Net, batches, config, more, net, start
from rich.text import Text
from torch import nn

from onefold.comm.nodes import Nodes
from onefold.config import load_config
from onefold.plan import Tier, count_bytes
from onefold.tools.bench.link_bench import LinkRates, measure_links
from onefold.tools.bench.offload_bench import Measured
from onefold.tools.cli.main import main
from onefold.tools.cli.terminal import lay_out
from onefold.tools.estimate.advice import advise
from onefold.tools.estimate.caching_allocator import CachingAllocator
from onefold.tools.estimate.dry_run import META, dry_run
from onefold.tools.estimate.forecast import Traffic, forecast
from onefold.tools.estimate.machines import GB, adjust, cpu_ranks, find_machine
from onefold.tools.estimate.model_states import (
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_cold,
)
from onefold.tools.estimate.models import ModelSource, PlanError, find_model, from_number, from_shapes
from onefold.tools.estimate.ops import OpCall, OpTimer, attend_backward
from onefold.tools.estimate.question import DEFAULT_CONFIG, Question, Setting, settings_for
from onefold.tools.estimate.shapes import SHAPES, known_shape
from onefold.tools.estimate.step_bench import measure_host
from onefold.tools.estimate.textbook import MOMENTS, MOMENTS_AND_MASTER, count_as_textbook
from onefold.tools.train.gpt import GPT, GPTConfig

# -- the dry run and the run -------------------------------------------------------------------------------------------


def run_for_real(document: dict[str, Any]) -> tuple[list[tuple[str, str, int, int]], dict[str, int]]:
    """What a rank of a real job sends in its third step, and holds."""
    engine = start(net(), document)
    accumulation = engine.batch.accumulation
    data = batches(3 * accumulation)
    before = engine.ledger.copy()
    for place, (x, y) in enumerate(data):
        if place == 2 * accumulation:
            engine.module  # noqa: B018 - reading it waits for what is in flight
            before = engine.ledger.copy()
        engine.backward(engine(x, y))
        engine.step()
    engine.module  # noqa: B018
    rows = [(r.operation, r.group, r.calls, r.bytes) for r in engine.ledger.since(before).rows() if r.calls]
    held = engine.model_memory.planned_bytes()
    return rows, {name: getattr(held, name) for name in ("parameters", "masters", "states")}


def dry_run_of(document: dict[str, Any], nodes: Nodes) -> Any:
    with META:
        model, x = Net(), torch.zeros(4, 7, dtype=torch.long)
    return dry_run(model, load_config(document), nodes, lambda call: call(x, x), uses_nccl=False)


SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "bf16": {"bf16": {"enabled": True}},
    "chunks": {"onefold": {"batch_chunks": 3}},
    "tiles": {"onefold": {"tiled_mlp": 3, "tiled_mlp_modules": ["Block"]}},
    "overlap": {"zero_optimization": {"overlap_comm": True}},
    "muon": {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}},
}


@covering(setting=SETTINGS, stage=(3, 2, 1, 0), world=(2, 1, more(3), more(4)), strength=1)
def test_a_dry_run_sends_and_holds_what_the_run_does(on_ranks, setting, stage, world):
    extra = SETTINGS[setting]
    zero = {"stage3_param_persistence_threshold": 0, **extra.get("zero_optimization", {}), "stage": stage}
    document = {**config(stage), **extra, "zero_optimization": zero}
    rows, held = on_ranks(world, run_for_real, document)[0]
    found = dry_run_of(document, Nodes.of_size(world, world))
    assert [(r.operation, r.group, r.calls, r.bytes) for r in found.traffic.rows() if r.calls] == rows
    rest = count_bytes([spec for unit in found.units for spec in unit], found.plan, Tier.DEVICE)
    assert {name: getattr(rest, name) for name in held} == held


@pytest.mark.parametrize(
    "zero",
    [
        more({"stage": 1}),
        more({"stage": 3}),
        more({"stage": 3, "zero_hpz_partition_size": 2}),
        {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2},
        more({"stage": 3, "mics_shard_size": 2}),
    ],
    ids=lambda zero: "+".join(zero),
)
def test_over_two_nodes_too(on_ranks, zero):
    document = {**config(zero["stage"]), "zero_optimization": {"stage3_param_persistence_threshold": 0, **zero}}
    document["onefold"] = {"node_size": 2}
    rows, _ = on_ranks(4, run_for_real, document)[0]
    found = dry_run_of(document, Nodes.of_size(2, 4))
    assert [(r.operation, r.group, r.calls, r.bytes) for r in found.traffic.rows() if r.calls] == rows


def test_gradients_of_earlier_micro_steps_are_counted():
    """Of stage 1, which keeps them whole: they lie beside the activations of the last micro-step."""
    peaks = []
    for accumulation in (1, 3):
        document = {**config(1), "gradient_accumulation_steps": accumulation, "bf16": {"enabled": True}}
        with META:
            model, x = Chain(4, 1024), torch.empty(8, 1024, dtype=torch.bfloat16)
        found = dry_run(model, load_config(document), Nodes((2,)), lambda call, x=x: call(x))
        peaks.append(max(moment.total for moment in found.trace.moments))
        assert all(moment.gradients <= moment.live for moment in found.trace.moments)
    assert peaks[1] - peaks[0] > 0.9 * 2 * 4 * 1024 * 1024  # whole in fp32, where one micro-step has them in bf16


class Chain(nn.Module):
    """Layers whose activations are known by hand."""

    def __init__(self, num: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()


@pytest.mark.parametrize("rows", [1 << 10, 1 << 12])
def test_activations_are_those_that_autograd_keeps(rows):
    num, width = 6, 512
    with META:
        model, x = Chain(num, width), torch.empty(rows, width)
    found = dry_run(model, load_config(config(0)), Nodes((1,)), lambda call: call(x))
    kept = num * rows * width * 4  # each layer's output, which the next one's backward reads
    peak = max(moment.live - moment.gradients for moment in found.trace.moments)
    # Above what is kept: an output before its relu in forward; in backward a gradient and what comes of it.
    assert kept < peak <= kept + 3 * rows * width * 4
    assert found.trace.work.flops == pytest.approx(2 * rows * width * width * (3 * num - 1))


def test_recomputing_takes_activations_away_and_attention_keeps_no_scores():
    question = Question(find_model("120m"), find_machine("H100"), DEFAULT_CONFIG, 4, 256)
    again = Question(find_model("120m", recompute=True), find_machine("H100"), DEFAULT_CONFIG, 4, 256)
    stage = [Setting("stage 2", {"stage": 2})]
    (kept,), (recomputed,) = (forecast(each, stage, finds_batch=False) for each in (question, again))
    assert recomputed.device.activations < kept.device.activations / 2
    assert recomputed.device.states == kept.device.states
    scores = 14 * 4 * 13 * 256 * 256 * 2  # of all layers, in 16 bits
    assert kept.device.activations < 14 * 4 * 256 * 832 * 2 * 20 + scores  # twenty rows a token and layer, no scores


@pytest.mark.slow
def test_offload_and_stages_move_bytes_and_never_make_any():
    question = Question(find_model("25m"), find_machine("4xA100"), DEFAULT_CONFIG, 1, 128)
    found = {each.setting.name: each for each in forecast(question, settings_for(question.machine))}
    numel = sum(parameter.numel() for parameter in question.model.build().parameters())
    for each in found.values():
        ranks = 1 if each.setting.name == "stage 0" else 4
        whole = (each.device.masters + each.device.states + each.host.masters + each.host.states) * ranks + each.nvme
        assert whole >= 12 * numel  # a master and two moments, somewhere, once
        assert whole < 12.5 * numel or each.nvme
    assert found["stage 2 + optimizer cpu"].device.states == 0
    assert found["stage 3"].traffic.calls > found["stage 2"].traffic.calls
    assert found["stage 3"].device.parameters < found["stage 2"].device.parameters
    assert found["stage 3 + optimizer, param nvme"].nvme > 0
    assert all(each.largest_batch > 1 for each in found.values())


# -- the allocator -----------------------------------------------------------------------------------------------------


def test_the_allocator_splits_reuses_and_joins_blocks():
    mib = 1 << 20
    allocator = CachingAllocator()
    allocator.allocate("a", 5 * mib)
    assert (allocator.allocated, allocator.reserved) == (5 * mib, 20 * mib)
    allocator.allocate("b", 14 * mib + mib // 2)  # out of the rest, of which half a MiB is not worth splitting off
    assert (allocator.allocated, allocator.requested) == (20 * mib, 19 * mib + mib // 2)
    assert allocator.reserved == 20 * mib
    allocator.free("a")
    allocator.allocate("c", 19 * mib + mib // 2)  # larger than what is free: a segment of its own
    assert (allocator.allocated, allocator.reserved) == (35 * mib, 40 * mib)
    allocator.free("b")
    allocator.free("c")
    assert (allocator.allocated, allocator.requested, allocator.reserved) == (0, 0, 40 * mib)
    allocator.allocate("whole", 20 * mib)  # neighbours have joined
    assert (allocator.allocated, allocator.reserved) == (20 * mib, 40 * mib)
    allocator.free("whole")
    allocator.allocate("small", 100)
    assert (allocator.allocated, allocator.reserved) == (512, 42 * mib)


def test_the_allocator_never_loses_a_byte():
    random = torch.Generator().manual_seed(1)
    allocator, live = CachingAllocator(), dict[int, int]()
    for number in range(2000):
        size = int(2 ** (torch.rand((), generator=random) * 25))
        if live and torch.rand((), generator=random) < 0.5:
            key = list(live)[int(torch.randint(len(live), (), generator=random))]
            allocator.free(key)
            del live[key]
        else:
            allocator.allocate(number, size)
            live[number] = size
        assert allocator.requested == sum(live.values()) <= allocator.allocated <= allocator.reserved
    for key in live:
        allocator.free(key)
    assert allocator.allocated == 0
    assert sum(size for free in allocator._free.values() for size, _ in free) == allocator.reserved


# -- tables and decisions of the tutorials -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "stage", "parts", "total"),
    [
        (4, 0, (350, 350, 1400), 2100),
        (4, 1, (350, 350, 350), 1050),
        (4, 2, (350, 88, 350), 788),
        (4, 3, (88, 88, 350), 526),
        (8, 3, (44, 44, 175), 263),
    ],
)
def test_the_table_of_175_billion_parameters(gpus, stage, parts, total):
    found = count_as_textbook(175e9, gpus, stage, MOMENTS)
    assert [found.parameters / GB, found.gradients / GB, found.states / GB] == pytest.approx(parts, abs=0.5)
    assert found.total / GB == pytest.approx(total, abs=1.1)


@pytest.mark.parametrize(("stage", "total"), [(0, 112), (1, 38.5), (2, 26.25), (3, 14)])
def test_the_table_of_7_billion_parameters_on_8_gpus(stage, total):
    assert count_as_textbook(7e9, 8, stage, MOMENTS_AND_MASTER).total / GB == total


@pytest.mark.parametrize("num_parameters", [5, 32, 7_000_000_031])
def test_a_model_that_is_a_number_has_exactly_so_many_parameters(num_parameters):
    assert sum(parameter.numel() for parameter in from_number(num_parameters).build().parameters()) == num_parameters


def advice_for(num_parameters: float, machine: str, **given: Any) -> str | None:
    question = Question(from_number(round(num_parameters)), adjust(find_machine(machine), **given), DEFAULT_CONFIG)
    return advise(question, forecast(question, settings_for(question.machine))).setting


def test_the_decisions_of_the_tutorials():
    assert advice_for(1e9, "H100") == "stage 0"  # it fits one GPU, and there is nobody to share with
    assert advice_for(7e9, "8xA100") in ("stage 1", "stage 2")
    assert advice_for(30e9, "8xA100") == "stage 3"
    assert "cpu" in str(advice_for(70e9, "8xA100"))
    assert "cpu" in str(advice_for(7e9, "4090", host_memory=256 * GB))
    assert "nvme" in str(advice_for(175e9, "8xA100", host_memory=1024 * GB))
    assert advice_for(7e9, "4090") == "stage 3 + optimizer nvme"  # parameters stay where they are computed with
    assert advice_for(1e12, "4090") is None


def test_what_does_not_fit_is_said_with_what_would_help():
    question = Question(find_model("1.3b"), find_machine("3090"), DEFAULT_CONFIG, 512, 1024)
    found = forecast(question, settings_for(question.machine)[:1])
    said = advise(question, found).reason
    assert "no setting fits" in said
    assert "short by" in said
    assert "--recompute" in said or "micro-batch" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["--params", "30e9", "--machine", "4090", "--host-memory", "63"],
        more(["--params", "500B", "--machine", "4090"]),
        more(["--params", "70B", "--machine", "4090", "--nvme", "0"]),
        ["--params", "3B", "--machine", "2x4090", "--gpu-memory", "2GB", "--host-memory", "4GB", "--nvme", "10GB"],
    ],
)
def test_what_would_help_does_when_it_is_given_back(arguments, capsys):
    assert main(["plan", *arguments]) == 1
    said = " ".join(capsys.readouterr().out.split())
    (flags,) = re.findall(r"\((--[^)]+)\), or with more", said)
    assert main(["plan", *arguments, *flags.split()]) == 0
    less = [flags.split()[0], str(int(flags.split()[1]) - 2)]
    assert main(["plan", *arguments, *flags.split(), *less]) in (0, 1)


def test_a_setting_that_leaves_some_memory_is_preferred_and_the_other_called_tight():
    question = Question(from_number(10**9), find_machine("2xA100"), DEFAULT_CONFIG)
    one, two = forecast(question, settings_for(question.machine)[2:4])
    memory = question.machine.gpu.memory
    traffic = {"traffic": Traffic(1, 0, 1), "seconds": {"computation": 1.0}}
    tight = replace(one, step=1.0, spare=memory // 50, is_tight=True, **traffic)
    roomy = replace(two, step=1.02, spare=memory // 5, **traffic)
    advice = advise(question, [tight, roomy])
    assert advice.setting == "stage 3"
    assert "stage 2 is tight, with 1.6 GB to spare" in advice.reason
    advice = advise(question, [tight, replace(roomy, step=1.5)])
    assert advice.setting == "stage 2"
    assert "less than 5% of the GPU's memory is left" in advice.reason


def test_a_setting_that_rounds_is_recommended_with_the_fastest_exact_one():
    question = Question(from_number(10**9), find_machine("2xA100"), DEFAULT_CONFIG)
    wires = Setting("stage 3 + qwZ + qgZ", {"stage": 3, "zero_quantized_gradients": True})
    (one,) = forecast(question, [Setting("stage 3", {"stage": 3})])
    exact = replace(one, step=3.47, traffic=Traffic(9, 0, 1), seconds={"node links": 3.4})
    said = advise(question, [exact, replace(exact, setting=wires, step=1.1)])
    assert said.setting == wires.name
    assert "It quantizes the weights and gradients" in said.reason
    assert "the fastest exact setting is stage 3 (about 3.47 s/step)" in said.reason


def test_recomputing_is_named_where_activations_are_why_states_leave_the_gpu():
    machine = adjust(find_machine("H100"), memory=8 * GB)
    question = Question(find_model("120m"), machine, DEFAULT_CONFIG, 24, 256)
    found = forecast(question, settings_for(machine)[4:5], finds_batch=False)
    assert found[0].fits
    assert "Activation checkpointing (--recompute) frees" in advise(question, found).reason


def accumulating(bus: float = 1e12, micro_batch: int = 4, **more: Any) -> tuple[Question, list[Any]]:
    """Four micro-steps with everything on the host, over a bus of this rate."""
    machine = adjust(find_machine("H100"), bus=bus)
    own = {"device_cache": 0, **more.pop("onefold", {})}
    base = {**DEFAULT_CONFIG, "gradient_accumulation_steps": 4, "onefold": own, **more}
    question = Question(find_model("25m", recompute=True), machine, base, micro_batch, 256)
    (setting,) = (each for each in settings_for(machine) if each.name == "stage 3 + optimizer, param cpu")
    return question, forecast(question, [setting], finds_batch=False)


@pytest.mark.slow
def test_chunks_are_advised_where_a_link_bounds_accumulation():
    question, (found,) = accumulating(bus=1e8)
    assert found.bound_by == "host bus"
    assert "One micro-batch of 16 with onefold.batch_chunks 4 takes about" in advise(question, [found]).reason
    document = question.in_chunks().document(found.setting, 16)
    assert document["gradient_accumulation_steps"] == 1
    assert document["onefold"]["batch_chunks"] == 4
    (chunked,) = forecast(question.in_chunks(), [found.setting], finds_batch=False)
    assert chunked.step < found.step / 2
    whole = {**question.in_chunks().config, "onefold": {"device_cache": 0}}
    (alone,) = forecast(replace(question.in_chunks(), config=whole), [found.setting], finds_batch=False)
    assert chunked.device.activations < alone.device.activations
    assert chunked.offload_traffic == alone.offload_traffic


@pytest.mark.slow
def test_chunks_are_not_advised_elsewhere():
    question, found = accumulating()
    assert found[0].bound_by not in ("host bus", "disk")
    assert "batch_chunks" not in advise(question, found).reason
    question, found = accumulating(bus=1e8, onefold={"batch_chunks": 2})
    assert found[0].bound_by == "host bus"
    assert "batch_chunks" not in advise(question, found).reason


@pytest.mark.slow
def test_chunks_that_do_not_fit_are_reported_with_the_logits_they_need():
    def build() -> nn.Module:
        with META:
            return GPT(GPTConfig(num_layers=4, num_heads=2, dim=128, sequence_length=256, vocab_size=30_000))

    def loss_of(batch: int, length: int) -> Any:
        tokens = torch.zeros(batch, length, dtype=torch.long, device=META)
        return lambda call: call(tokens, tokens)

    source = ModelSource("a GPT with many words", build, loss_of, vocabulary=30_000)
    question, (found,) = accumulating(bus=1e8)
    question = replace(question, model=source, micro_batch=2)
    (found,) = forecast(question, [found.setting], finds_batch=False)
    question = replace(question, machine=adjust(question.machine, memory=found.device.total + 1_000_000))
    said = advise(question, forecast(question, [found.setting], finds_batch=False)).reason
    assert "One micro-batch of 8 with onefold.batch_chunks 4 gathers them once, but is short by" in said
    assert "onefold.tiled_cross_entropy saves most of its 0.7 GB of logits" in said


# -- the largest micro-batch -------------------------------------------------------------------------------------------


def planned_alone(question: Question, setting: Setting, batch: int) -> bool:
    (found,) = forecast(replace(question, micro_batch=batch), [setting], finds_batch=False)
    return found.fits


@pytest.mark.parametrize(
    ("recompute", "given", "memory", "places"),
    [
        (False, 1, 3 * GB, (3,)),
        more(False, 1, 3 * GB, (2, 5)),
        more(True, 3, 4 * GB, (2, 3, 5)),
        more(False, 64, 3 * GB, (2, 3, 5)),
        more(True, 1, 2 * GB, (2, 3, 5)),
    ],
)
def test_the_largest_batch_fits_when_it_is_planned_itself_and_one_more_does_not(recompute, given, memory, places):
    machine = adjust(find_machine("2xA100"), memory=memory)
    question = Question(find_model("25m", recompute=recompute), machine, DEFAULT_CONFIG, given, 256)
    settings = [settings_for(machine)[place] for place in places]
    for setting, each in zip(settings, forecast(question, settings), strict=True):
        largest = each.largest_batch
        assert largest is not None
        assert largest > 1
        assert planned_alone(question, setting, largest)
        assert not planned_alone(question, setting, largest + 1)


class Uneven(nn.Module):
    """Makes a copy for every third sequence, so that no two micro-batches say what another takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4096, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.layer(x).relu() for _ in range(1 + x.shape[0] // 3)]
        return torch.stack(parts).sum()


def test_so_it_is_where_ops_depend_on_the_batch():
    def loss_of(batch: int, length: int) -> Any:
        return lambda call: call(torch.empty(batch, length, 4096, device=META))

    def build() -> nn.Module:
        with META:
            return Uneven()

    machine = adjust(find_machine("H100"), memory=2 * GB)
    question = Question(ModelSource("uneven", build, loss_of), machine, {"optimizer": {"type": "SGD"}}, 2, 512)
    (found,) = forecast(question, [Setting("stage 2", {"stage": 2})])
    assert found.largest_batch
    assert planned_alone(question, found.setting, found.largest_batch)
    assert not planned_alone(question, found.setting, found.largest_batch + 1)


def test_no_batch_is_named_where_none_fits():
    small = adjust(find_machine("2xA100"), memory=GB)
    question = Question(find_model("25m"), small, DEFAULT_CONFIG, 4, 256)
    assert [each.largest_batch for each in forecast(question, settings_for(small)[:1])] == [0]
    no_host = adjust(find_machine("2xA100"), host_memory=GB)
    question = Question(find_model("25m"), no_host, DEFAULT_CONFIG, 1, 64)
    (found,) = forecast(question, [Setting("3", {"stage": 3, "offload_optimizer": {"device": "cpu"}})])
    assert (found.fits, found.largest_batch) == (False, 0)


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_says_what_fits_and_writes_a_config_that_loads(tmp_path, capsys):
    written = tmp_path / "ds_config.json"
    assert main(["plan", "--model", "tiny", "--machine", "2xA100", "--batch", "2", "--write", str(written)]) == 0
    said = capsys.readouterr().out
    assert "stage 3 + optimizer cpu" in said
    assert "take stage" in said
    assert "estimates from data sheets" in said
    assert "flash attention" in said
    chosen = load_config(str(written))
    assert chosen.train_micro_batch_size_per_gpu == 2
    assert f"\ntake stage {chosen.zero_optimization.stage}" in said
    assert said.endswith(f"\nwritten: {written}\n")


def test_the_whole_batch_of_a_config_is_kept(tmp_path, capsys):
    given, written = tmp_path / "given.json", tmp_path / "written.json"
    given.write_text(json.dumps({"train_batch_size": 48, "gradient_accumulation_steps": 3}))
    flags = ["plan", "--params", "1e9", "--machine", "4xA100", "--config", str(given), "--write", str(written)]
    assert main(flags) == 0
    chosen = load_config(str(written))
    assert 4 * chosen.train_micro_batch_size_per_gpu * chosen.gradient_accumulation_steps == 48
    given.write_text(json.dumps({"train_batch_size": 50, "train_micro_batch_size_per_gpu": 25}))
    assert main(["plan", "--params", "1e9", "--machine", "4xA100", "--config", str(given)]) == 2
    assert "train_batch_size 50 is not a multiple" in capsys.readouterr().err


def test_the_command_as_json_and_from_a_number(capsys):
    assert main(["plan", "--params", "7e9", "--machine", "8xA100", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    rows = {row["setting"]["name"]: row for row in facts["settings"]}
    assert rows["stage 1"]["fits"]
    assert not rows["stage 0"]["fits"]
    assert rows["stage 3"]["device"]["masters"] == pytest.approx(7e9 * 4 / 8, rel=1e-3)
    assert rows["stage 3"]["step"] is None
    assert any("activations" in said for said in facts["assumptions"])


def test_tables_have_no_empty_column(capsys):
    assert main(["plan", "--params", "7e9", "--machine", "8xA100", "--wide"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line.split() for line in lines if line.startswith("setting")]
    assert heads[0] == ["setting", "GPU", "host", "NVMe", "verdict"]
    assert heads[1] == ["setting", "params", "grads", "masters", "moments", "overhead", "total"]
    assert not [line for line in lines if line != line.rstrip() or len(line) > 120]
    assert "stage 1 and stage 2 are equal" in "\n".join(lines)
    assert "up to max_in_cpu" in "\n".join(lines)


@pytest.mark.parametrize("width", [40, more(80), 100, more(120)])
def test_a_narrow_terminal_cuts_no_name_no_number_and_no_verdict(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    arguments = ["plan", "--params", "500B", "--machine", "8xA100"]
    main(arguments)
    wide = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", str(width))
    main(arguments)
    narrow = capsys.readouterr().out
    assert narrow.split() == wide.split()
    lines = narrow.splitlines()
    assert max(map(len, lines)) <= max(width, 46)
    assert not [line for line in lines if line != line.rstrip()]
    assert sum("stage 3 + optimizer nvme, param cpu" in line for line in lines) >= 1


def test_a_table_breaks_heads_and_stacks_before_it_cuts():
    heads, row = ("setting", ">GPU", ">max batch", "verdict"), ("stage 3 + optimizer cpu", "1051.7", "12", "no: GPU")
    table = [[Text(cell) for cell in row]]
    assert [line.plain for line in lay_out(heads, table, 60)] == [
        "setting                     GPU  max batch  verdict",
        "stage 3 + optimizer cpu  1051.7         12  no: GPU",
    ]
    assert [line.plain for line in lay_out(heads, table, 46)] == [
        "                                 max",
        "setting                    GPU batch verdict",
        "stage 3 + optimizer cpu 1051.7    12 no: GPU",
    ]
    assert [line.plain for line in lay_out(heads, table, 30)] == [
        "setting",
        "              max",
        "        GPU batch verdict",
        "stage 3 + optimizer cpu",
        "     1051.7    12 no: GPU",
    ]


def test_small_models_are_shown_in_mb(capsys):
    assert main(["plan", "--params", "1M", "--machine", "2xA100", "--wide"]) == 0
    said = capsys.readouterr().out
    assert "Peak memory of one GPU by kind, in MB" in said
    assert "0.0" not in said.partition("Rule of thumb")[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--params", "7e9", "--machine", "8xZ100"], "one of these GPUs"),
        (["--params", "7e9", "--machine", "8*A100"], "one of these GPUs"),
        (["--params", "7e9", "--machine", "H100", "--batch", "2"], "need a model with a forward"),
        (["--params", "-1", "--machine", "H100"], "--params -1: must be above 0"),
        (["--params", "7e30", "--machine", "H100"], "--params 7e30 is too large"),
        (["--params", "nan", "--machine", "H100"], "--params nan: must be above 0"),
        (["--params", "7GB", "--machine", "H100"], "--params 7GB: '7GB' is not a number of parameters"),
        (["--params", "7B", "--machine", "H100", "--gpu-memory", "80Gb"], "'80Gb' is not a size"),
        (["--params", "7B", "--machine", "H100", "--host-memory", "inf"], "must be above 0"),
        (["--params", "7B", "--machine", "H100", "--nvme=-1"], "--nvme -1: must be 0 or more"),
        (["--params", "7B", "--machine", "H100", "--link", "50Gb/s"], "Give a number with a unit, as in 50GB/s"),
        (["--params", "7B", "--machine", "8xH100", "--nodes", "1000000"], "--nodes 1000000 is too large"),
        (["--params", "7B", "--machine", "8xH100", "--nodes", "60000"], "480,000 GPUs exceed the limit"),
        (["--params", "7B", "--machine", "H100", "--write", "/nowhere/x.json"], "the file cannot be written"),
        (["--params", "7B", "--machine", "H100", "--config", "/dev/zero"], "not a config, because"),
        (["--model", "nowhere", "--machine", "H100"], "no such file or folder"),
        (["--model", "/dev/zero", "--machine", "H100"], "it is a device, not a regular file"),
        (["--model", "test_estimate:nothing", "--machine", "H100"], "test_estimate"),
        (["--model", "test_estimate:broken", "--machine", "H100"], "the model cannot be built (KeyError: 'no model')"),
        (["--model", "25m", "--machine", "H100", "--seq", "4096"], "has 256 positions"),
        (["--model", "25m", "--machine", "H100", "--lora", "4"], "--lora needs a model of transformers"),
        (["--model", "llama-7b", "--machine", "H100", "--lora", "0"], "--lora 0: must be above 0"),
    ],
)
def test_mistakes_are_told(arguments, says, capsys):
    assert main(["plan", *arguments]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said


def broken() -> nn.Module:
    raise KeyError("no model")


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (json.dumps(LLAMA)[:60], "config.json, line 1, column 61"),
        ("", "config.json, line 1, column 1"),
        ("[1, 2]", "an object of keys and values"),
        ("7", "an object of keys and values"),
        (json.dumps({**LLAMA, "num_attention_heads": 7}), "not a multiple of the number of attention heads"),
        (json.dumps({**LLAMA, "hidden_size": "wide"}), "transformers rejects this config"),
        (json.dumps({**LLAMA, "hidden_size": -64}), "the model cannot be built"),
        (json.dumps({**LLAMA, "num_hidden_layers": 10**9}), "At most 4096 layers"),
        (json.dumps({**LLAMA, "model_type": "nosuch"}), "transformers rejects this config"),
        (json.dumps({**LLAMA, "architectures": [5]}), "the model cannot be built"),
        (json.dumps({**LLAMA, "hidden_act": "nosuch"}), "the model cannot be built"),
    ],
)
def test_a_config_that_is_wrong_is_told_by_its_file(text, says, tmp_path, capsys):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(text)
    for model in (tmp_path, tmp_path / "config.json"):
        assert main(["plan", "--model", str(model), "--machine", "H100"]) == 2
        said = capsys.readouterr().err
        assert says in said
        assert str(tmp_path) in said


def test_files_that_are_no_model_are_told(tmp_path, capsys):
    (tmp_path / "notes.json").write_text("{}")
    for model, says in ((tmp_path, "contains neither a config"), (tmp_path / "notes.json", "model_type is missing")):
        assert main(["plan", "--model", str(model), "--machine", "H100"]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "name"),
    [("7b", "Llama 7B"), ("llama-7b", "Llama 7B"), ("llama-3-8b", "Llama 8B"), ("13b", "Llama 13B"),
     ("70b", "Llama 70B"), ("meta-llama/Meta-Llama-3-8B", "Llama 8B"), ("gpt-125m", "GPT 125M"), ("9b", None)],
)  # fmt: skip
def test_well_known_models_have_names(text, name):
    assert known_shape(text) == name


@pytest.mark.parametrize("name", ["llama-7b", "llama-8b", "gpt-125m"])
def test_a_well_known_model_is_the_shape_of_the_page(name):
    pytest.importorskip("transformers")
    shape = SHAPES[str(known_shape(name))]
    model = find_model(name).build()
    block = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    assert len(block) == shape["layers"]
    embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    assert (embedding.num_embeddings, embedding.embedding_dim) == (shape["vocabulary"], shape["hidden"])
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(
        {"llama-7b": 6.738e9, "llama-8b": 8.03e9, "gpt-125m": 124e6}[name], rel=0.01
    )


def test_sizes_are_read_as_people_write_them(capsys):
    answers = []
    for size in ("80", "80GB", "0.08TB", "80G"):
        flags = ["--gpu-memory", size, "--host-memory", "1TB", "--nvme", "0", "--link", "400Gbit/s", "--json"]
        assert main(["plan", "--params", "1.3b", "--machine", "8xH100", *flags]) == 0
        answers.append(capsys.readouterr().out)
    assert len(set(answers)) == 1
    machine = json.loads(answers[0])["machine"]
    assert (machine["gpu"]["memory"], machine["host_memory"], machine["across"]) == (80 * GB, 1000 * GB, 50 * GB)


def test_a_model_of_transformers_and_one_with_adapters(tmp_path):
    transformers = pytest.importorskip("transformers")
    shape = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, vocab_size=512
    )
    shape.save_pretrained(tmp_path)
    stage = [Setting("stage 3", {"stage": 3})]
    sizes = {}
    for lora in (0, 4):
        question = Question(find_model(str(tmp_path), lora=lora), find_machine("2xH100"), DEFAULT_CONFIG, 2, 64)
        (sizes[lora],) = forecast(question, stage, finds_batch=False)
    assert sizes[4].device.states < sizes[0].device.states / 5
    assert sizes[0].device.activations > 0
    assert sizes[0].traffic.inside > 0


def test_a_forward_that_fails_in_a_dry_run_is_reported():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(torch.zeros(1, int(x.float().sum().item() / 0), device=x.device))

    source = ModelSource("odd", Odd, lambda batch, length: lambda call: call(torch.zeros(batch, length, device=META)))
    with pytest.raises(PlanError, match="odd: the dry run on meta tensors fails"):
        forecast(Question(source, find_machine("H100"), DEFAULT_CONFIG, 1, 8), [Setting("stage 2", {"stage": 2})])


def test_deepspeeds_names_tell_the_plans_bytes(capsys):
    from onefold.compat.deepspeed.runtime.zero import stage3, stage_1_and_2

    name = "estimate_zero3_model_states_mem_needs_all_cold"
    assert getattr(stage3, name) is estimate_zero3_model_states_mem_needs_all_cold
    live = stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live
    assert live is estimate_zero2_model_states_mem_needs_all_live
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    estimate_zero2_model_states_mem_needs_all_live(model, num_gpus_per_node=4)
    said = capsys.readouterr().out
    held = 2 * 8 * 1024 * 1024 + (4 + 4 + 8) * 8 * 1024 * 1024 / 4  # parameters; gradients, masters, moments over four
    assert f"{held / 1e6:.1f} MB | offload_optimizer=none" in said
    estimate_zero3_model_states_mem_needs_all_cold(7_000_000_000, 50_000_000, 8, 2)
    said = capsys.readouterr().out
    assert f"{7e9 * 16 / 16 / 1e9:.2f} GB | offload_param=none, offload_optimizer=none" in said
    assert "HW: setup with 2 nodes, 8 GPUs per node" in said


def test_shapes_alone_are_cut_into_blocks():
    source = from_shapes("a", {f"model.layers.{place}.weight": (8, 8) for place in range(4)})
    found = dry_run(source.build(), load_config({**DEFAULT_CONFIG, "train_micro_batch_size_per_gpu": 1}), Nodes((2,)))
    assert len(found.units) == 4


def test_a_checkpoint_is_a_model_too(on_ranks, tmp_path):
    on_ranks(2, _save, str(tmp_path))
    model = find_model(str(tmp_path)).build()
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        name: tuple(tensor.shape) for name, tensor in Net().state_dict().items()
    }


def _save(folder: str) -> None:
    engine = start(net(), config(3))
    x, y = batches(1)[0]
    engine.backward(engine(x, y))
    engine.step()
    engine.save_checkpoint(folder)
    assert Path(folder).exists()


# -- seconds -----------------------------------------------------------------------------------------------------------


def test_every_op_of_a_step_is_known_by_its_shapes_and_can_be_run_by_itself():
    found = dry_run_of(config(2), Nodes.of_size(1, 1))
    work = found.trace.work
    assert sum(work.calls.values()) == work.num_ops - 2 * sum(
        number for call, number in work.calls.items() if call.func is attend_backward
    ), "three kernels are launched for the backward of attention, which is one function here"
    timer = OpTimer(torch.device("cpu"), bandwidth=1.0)
    assert timer.seconds_of(work.calls) > 0
    # At a byte a second, what could not be run would take long.
    assert max(timer.known.values()) < 1
    before = dict(timer.known)
    timer.seconds_of(work.calls)
    assert timer.known == before, "what is known is not run again"


def test_indices_of_a_replayed_op_stay_inside_what_they_count():
    call = OpCall.of(torch.ops.aten.embedding.default, (torch.empty(7, 3), torch.empty(5, 2, dtype=torch.long)), {})
    assert call.bind(torch.device("cpu"))().shape == (5, 2, 3)
    assert call.num_bytes == 7 * 3 * 4 + 10 * 8
    assert call == OpCall.of(torch.ops.aten.embedding.default, (torch.ones(7, 3), torch.zeros(5, 2).long()), {})


def test_a_timed_step_replaces_the_guess():
    source = find_model("tiny")
    fast_host = replace(find_machine("H100"), launch=1e-9, boundary=0.0)
    question = Question(source, fast_host, DEFAULT_CONFIG, 1, 32)
    (guess,) = forecast(question, [Setting("0", {"stage": 0})], finds_batch=False)
    timer = OpTimer(torch.device("cpu"), bandwidth=1e9)
    (timed,) = forecast(question, [Setting("0", {"stage": 0})], finds_batch=False, timer=timer)
    assert timed.device == guess.device
    assert timed.seconds["computation"] > guess.seconds["computation"], "this CPU is no H100"


def test_a_slow_host_takes_longer_to_shard_parameters():
    source, machine = find_model("tiny"), find_machine("2xH100")
    settings = [Setting("2", {"stage": 2}), Setting("3", {"stage": 3, "stage3_param_persistence_threshold": 0})]

    def times(**rates: float) -> list[float]:
        question = Question(source, replace(machine, **rates), DEFAULT_CONFIG, 1, 32)
        return [found.seconds["computation"] for found in forecast(question, settings, finds_batch=False)]

    before, after = times(sharding=1e-3), times(sharding=3e-3)
    assert after[0] == before[0]
    num_blocks = (after[1] - before[1]) / 2e-3
    assert num_blocks == pytest.approx(round(num_blocks))
    assert num_blocks > 1
    assert times(launch=1.0)[0] > before[0]


@pytest.mark.slow
def test_what_the_host_takes_is_measured_by_a_real_step():
    host = measure_host()
    assert 0 < host.launch < 0.1
    assert 0 < host.boundary < 1
    assert 0 <= host.sharding < 1


@pytest.mark.slow
def test_links_are_measured_between_real_ranks():
    links = measure_links(2, 1 << 20)
    assert links.ranks == 2
    assert links.sent > 1e5
    assert 0 < links.call < 1


def test_cpu_ranks_are_a_machine_of_what_was_measured():
    measured = Measured("h", "now", 2, 8 * GB, 20.0, 1e9, products=1e11, links=LinkRates(2, 1e9, 1e-3))
    machine = cpu_ranks(2, measured)
    assert machine.world == 2
    assert machine.gpu.memory == 4 * GB
    assert machine.call == 1e-3
    question = Question(find_model("tiny"), machine, {**DEFAULT_CONFIG, "bf16": {"enabled": False}}, 1, 32)
    (found,) = forecast(question, [Setting("2", {"stage": 2})], uses_nccl=False, finds_batch=False)
    assert found.step == pytest.approx(sum(found.seconds.values())), "cores do one thing at a time"
    assert found.seconds["GPU links"] > found.traffic.calls * 1e-3


def test_what_steps_by_its_own_class_is_stepped_by_the_host() -> None:
    """As an engine does it: nothing passes through the device."""
    setting = Setting("stage 2", {"stage": 2, "offload_optimizer": {"device": "cpu"}})
    found = {}
    for name in ("AdamW", "NAdam"):
        settings = {**DEFAULT_CONFIG, "optimizer": {"type": name, "params": {"lr": 1e-3}}}
        (found[name],) = forecast(Question(find_model("25m"), find_machine("H100"), settings, 2, 128), [setting])
    assert "state transfer" in found["AdamW"].seconds
    assert "state transfer" not in found["NAdam"].seconds
    assert found["NAdam"].offload_traffic.down < found["AdamW"].offload_traffic.down


def test_states_of_host_and_disk_share_the_bus_and_not_its_chunks() -> None:
    """All that passes through the device crosses one bus; what comes from a disk has memory of its own there."""
    disk = {"device": "nvme", "nvme_path": "/local_nvme"}
    found = []
    for some in (0, 10_000_000, 1_000_000_000):
        setting = Setting("", {"stage": 2, "offload_optimizer": {**disk, "max_in_cpu": some}})
        machine = replace(find_machine("H100"), disk=1e12)
        config = {**DEFAULT_CONFIG, "onefold": {"offloaded_step": "device"}}
        found += forecast(Question(find_model("25m"), machine, config, 2, 128), [setting], finds_batch=False)
    on_disk, mixed, on_host = found
    assert len({round(each.seconds["state transfer"], 9) for each in found}) == 1
    for each in found:
        assert each.step is not None
        beside = [each.seconds[name] for name in ("computation", "host bus") if name in each.seconds]
        assert each.step >= max(beside) + each.seconds["state transfer"]
    assert mixed.device.workspace > max(on_disk.device.workspace, on_host.device.workspace)
