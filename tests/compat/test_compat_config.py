"""DeepSpeed's names around configs, schedules, loss scales, launching and helpers: values, errors, kinds."""

from __future__ import annotations

import argparse
import os
import stat
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from onefold.compat.deepspeed.comm import comm
from onefold.compat.deepspeed.launcher import runner
from onefold.compat.deepspeed.ops import op_builder
from onefold.compat.deepspeed.runtime import lr_schedules, precision_config
from onefold.compat.deepspeed.runtime.config import DeepSpeedConfig
from onefold.compat.deepspeed.runtime.fp16 import loss_scaler
from onefold.compat.deepspeed.runtime.utils import call_to_str, clip_tensors_by_global_norm
from onefold.compat.deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from onefold.compat.deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig
from onefold.compat.deepspeed.utils import bwc, debug, numa, timer
from onefold.compat.deepspeed.utils.torch import required_torch_version
from pydantic import ValidationError

# -- config objects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["loss_scale", "loss_scale_window", "min_loss_scale"])
@pytest.mark.parametrize("value", [True, [], {}, "much", float("nan"), float("inf"), -1])
def test_numbers_of_the_fp16_section_are_numbers(name, value):
    with pytest.raises(ValidationError, match=f"fp16.{name} must|greater than or equal"):
        precision_config.DeepSpeedFP16Config(**{name: value})


def test_precision_sections_are_read_by_their_new_and_old_names():
    scale = precision_config.get_float16_config({"fp16": {"enabled": True, "loss_scale": "8"}})
    assert (scale.loss_scale, scale.dynamic_loss_scale_args()["init_scale"]) == (8.0, 65536.0)
    assert all(precision_config.get_bfloat16_config({key: {"enabled": True}}).enabled for key in ("bf16", "bfloat16"))


def test_keys_with_several_old_names_are_read_by_each():
    assert DeepSpeedZeroConfig(stage3_gather_fp16_weights_on_model_save=True).gather_16bit_weights_on_model_save
    assert DeepSpeedZeroOffloadOptimizerConfig(pipeline_read=True).pipeline
    assert not DeepSpeedZeroOffloadOptimizerConfig().pipeline


def test_a_batch_is_solved_again_after_it_was_changed():
    config = DeepSpeedConfig({"train_batch_size": 8})
    config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps = 12, None, 3
    config._configure_train_batch_size()
    assert config.train_micro_batch_size_per_gpu == 4
    config.train_batch_size = 13
    with pytest.raises(AssertionError, match="train_batch_size 13"):
        config._configure_train_batch_size()


# -- schedules ---------------------------------------------------------------------------------------------------------


def optimizer(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.1, **options)


def arguments(*words: str) -> argparse.Namespace:
    return lr_schedules.add_tuning_arguments(argparse.ArgumentParser()).parse_args(words)


@pytest.mark.parametrize("name", lr_schedules.VALID_LR_SCHEDULES)
def test_switches_make_a_section_that_the_schedule_takes(name):
    config, error = lr_schedules.get_config_from_args(arguments("--lr_schedule", name))
    assert error is None
    more = {"total_num_steps": 2000} if name in ("WarmupDecayLR", "WarmupCosineLR") else {}
    getattr(lr_schedules, name)(optimizer(), **config["params"], **more)
    rate, reason = lr_schedules.get_lr_from_config(config)
    assert (rate is None) == (name == "WarmupCosineLR") == bool(reason)


def test_what_no_switch_says_is_left_to_the_schedule():
    config, _ = lr_schedules.get_config_from_args(arguments("--lr_schedule", "OneCycle"))
    assert "cycle_second_step_size" not in config["params"]
    assert lr_schedules.get_config_from_args(arguments())[0] is None


def test_a_cycle_may_end_at_its_top():
    schedule = lr_schedules.OneCycle(
        optimizer(), cycle_min_lr=0.1, cycle_max_lr=0.5, cycle_first_step_size=4, cycle_second_step_size=0
    )
    assert (schedule.step_ratio, schedule.get_lr()) == (1.0, [0.1])
    rates = []
    for _ in range(6):
        schedule.step()
        rates += schedule.get_lr()
    assert rates == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.1, 0.1])


def test_momentum_begins_at_its_lower_bound_and_is_told_from_the_curve():
    given = optimizer(betas=(0.7, 0.95))
    schedule = lr_schedules.OneCycle(given, cycle_min_lr=0.1, cycle_max_lr=0.5, cycle_first_step_size=4)
    assert given.param_groups[0]["betas"] == (0.8, 0.95)
    assert schedule.get_mom() == [(0.9, 0.95)]


# -- loss scales -------------------------------------------------------------------------------------------------------


def test_a_loss_scale_by_deepspeeds_names():
    scaler = loss_scaler.CreateLossScaler(
        torch.half, 0, True,
        {"init_scale": 16, "scale_window": 2, "min_scale": 1, "delayed_shift": 2, "consecutive_hysteresis": False},
    )  # fmt: skip
    scaler.update_scale(True)
    assert (scaler.cur_scale, scaler.cur_hysteresis, scaler.cur_iter) == (16, 1, 1)
    scaler.update_scale(True)
    assert (scaler.loss_scale, scaler.last_overflow_iter, scaler.scale_window) == (8, 1, 2)
    assert loss_scaler.CreateLossScaler(torch.bfloat16, 8, False, None).loss_scale == 1.0
    with pytest.raises(ValueError, match="loss_scale must be greater than 0"):
        scaler.cur_scale = 0
    with pytest.raises(ValueError, match=r"fp16\.loss_scale must be finite"):
        loss_scaler.LossScaler(float("inf"))


# -- the engine --------------------------------------------------------------------------------------------------------


def kinds_of_optimizers(stage: int, precision: str, section: dict[str, Any]) -> set[str]:
    from onefold.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from onefold.compat.deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from onefold.compat.deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from onefold.compat.deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    from onefold.compat import deepspeed

    config = {
        "train_batch_size": 1, precision: {"enabled": True}, "optimizer": section,
        "zero_optimization": {"stage": stage}, "log_level": "error",
    }  # fmt: skip
    engine, found, _, _ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)
    kinds = (DeepSpeedCPUAdam, FusedAdam, BF16_Optimizer, FP16_Optimizer, FP16_UnfusedOptimizer)
    named = {kind.__name__ for kind in kinds if isinstance(found, kind)}
    assert found.loss_scaler.cur_scale == found.loss_scale_config.cur_scale == found.loss_scale
    assert found.low_precision_dtype is (torch.bfloat16 if precision == "bf16" else torch.float16)
    engine.close()
    return named


def test_the_engines_optimizer_is_of_the_kind_that_deepspeed_makes(on_ranks):
    adam, sgd = {"type": "Adam", "params": {"lr": 0.1}}, {"type": "SGD", "params": {"lr": 0.1}}
    assert on_ranks(1, kinds_of_optimizers, 0, "fp16", adam) == [{"FusedAdam", "FP16_Optimizer"}]
    assert on_ranks(1, kinds_of_optimizers, 0, "bf16", sgd) == [{"FP16_UnfusedOptimizer"}]
    assert on_ranks(1, kinds_of_optimizers, 1, "bf16", adam) == [{"FusedAdam", "BF16_Optimizer"}]
    assert on_ranks(1, kinds_of_optimizers, 2, "bf16", adam) == [{"FusedAdam"}]


class Odd(torch.optim.SGD):
    """Nobody knows whether it looks at each element by itself."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def what_is_refused() -> list[str]:
    from onefold.compat import deepspeed

    def told(kind: type[BaseException], call: Any) -> str:
        with pytest.raises(kind) as raised:
            call()
        return str(raised.value)

    def start(**given: Any) -> Any:
        model = torch.nn.Linear(4, 4)
        maker = given.pop("maker", None)
        made = maker(model.parameters(), lr=0.1) if maker else None
        config = {"train_batch_size": 1, "log_level": "error", **given}
        return deepspeed.initialize(model=model, optimizer=made, config=config)[0]

    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    words = [
        told(AssertionError, lambda: deepspeed.initialize(config={})),
        told(AssertionError, lambda: start(maker=Odd, zero_optimization={"stage": 1})),
        told(NotImplementedError, lambda: start(**sgd, data_types={"grad_accum_dtype": "bf16"})),
    ]
    engine = start()
    words += [told(AssertionError, lambda: engine.backward(torch.ones(()))), told(AssertionError, engine.step)]
    engine.close()
    for stage in (1, 2):
        with start(**sgd, zero_optimization={"stage": stage}) as engine:
            if stage == 2:
                words.append(told(AssertionError, engine.no_sync().__enter__))
                continue
            with engine.no_sync():
                words += [told(AssertionError, engine.no_sync().__enter__), told(AssertionError, engine.step)]
    return words


def test_the_engine_refuses_what_deepspeed_asserts(on_ranks):
    (words,) = on_ranks(1, what_is_refused)
    expected = [
        "initialize needs a model", "zero_allow_untested_optimizer", "data_types.grad_accum_dtype = 'bf16'",
        "use backward", "use step", "reentry is unsupported", "inside no_sync",
        "incompatible with gradient partitioning",
    ]  # fmt: skip
    assert [part for part, told in zip(expected, words, strict=True) if part not in told] == []


def what_stays_as_it_is(stage: int) -> tuple[Any, ...]:
    import torch.distributed as dist

    from onefold.compat import deepspeed

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    model.register_buffer("frequencies", torch.ones(8))
    codes = torch.full((8, 8), 9 if dist.get_rank() == 0 else 0, dtype=torch.uint8).view(torch.float8_e4m3fn)
    model.codes = torch.nn.Parameter(codes, requires_grad=False)
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}}, "log_level": "error",
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, config=config)
    told = (model.frequencies.dtype, model[1].running_mean.dtype, model[0].weight.dtype, model.codes.dtype)
    taken = bool((model.codes.data.view(torch.uint8) == 9).all())
    engine.close()
    return (*told, taken)


@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_of_containers_and_weights_of_eight_bits_stay_as_they_are(on_ranks, stage):
    expected = (torch.float32, torch.bfloat16, torch.bfloat16, torch.float8_e4m3fn, True)
    assert on_ranks(2, what_stays_as_it_is, stage) == [expected] * 2


# -- starting ----------------------------------------------------------------------------------------------------------


def test_slots_are_chosen_by_name():
    nodes = {"one": [0, 1, 2], "two": [0, 1]}
    choose = runner.parse_resource_filter
    assert choose(nodes) == nodes
    assert choose(nodes, include_str="one:1@one:0,1") == {"one": [0, 1]}
    assert choose(nodes, exclude_str="one@two:0") == {"two": [1]}
    assert choose(nodes, exclude_str="one@two") == {}
    assert runner.parse_inclusion_exclusion({"one": 2, "two": 1}, "one:1", "") == {"one": [1]}
    for given in ({"include_str": "three"}, {"exclude_str": "two:7"}, {"include_str": "a", "exclude_str": "b"}):
        with pytest.raises(ValueError, match=r"three|No slot '7'|exclude each other"):
            choose(nodes, **given)


def test_a_hostfile_by_its_lines_or_its_path(tmp_path):
    (tmp_path / "hosts").write_text("one slots=2\n# none\n\ntwo slots=4\n")
    assert runner.fetch_hostfile(str(tmp_path / "hosts")) == {"one": 2, "two": 4}
    assert runner.fetch_hostfile(str(tmp_path / "nowhere")) == {}
    for lines in (["one"], ["one slots=1", "one slots=2"], [""]):
        with pytest.raises(ValueError, match="hostfile"):
            runner._parse_hostfile(lines)


def test_wrong_use_of_the_launcher_raises_in_python_and_ends_a_command(monkeypatch, capsys):
    words = ["--num_gpus", "1", "--include", "localhost:0", "train.py"]
    with pytest.raises(ValueError, match="Leave --num_nodes and --num_gpus out"):
        runner.main(words)
    monkeypatch.setattr("sys.argv", ["deepspeed", *words])
    assert runner.main() == 2
    assert "--include" in capsys.readouterr().err


@pytest.fixture
def without_launcher(monkeypatch):
    for name in (*comm._OF_LAUNCHER, *comm.MPI_WORLD_SIZE_ENV_VARS):
        monkeypatch.delenv(name, raising=False)


def test_one_rank_of_an_mpi_job_does_not_train_alone(without_launcher, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert not comm.in_multi_rank_mpi_job()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert comm.in_multi_rank_mpi_job()
    monkeypatch.setitem(__import__("sys").modules, "mpi4py", None)
    with pytest.raises(ImportError, match="one of several"):
        comm.init_distributed("gloo")
    assert "WORLD_SIZE" not in os.environ


def test_one_process_is_told_what_a_launcher_would_tell(without_launcher, monkeypatch):
    monkeypatch.setattr(os, "environ", {"MASTER_PORT": "7"})
    comm.single_process_discovery(distributed_port=8)
    assert os.environ["MASTER_PORT"] == "7"
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")


# -- helpers -----------------------------------------------------------------------------------------------------------

NUMACTL = """#!/bin/sh
[ "$1" = --hardware ] && echo "node 0 cpus: 0 1 2 3" && echo "node 1 cpus: 4 5 6 7" && exit 0
for option in "$@"; do [ "$option" = "$DENIED" ] && echo "$WHY" >&2 && exit 1; done
exit 0
"""


@pytest.mark.parametrize(("denied", "left"), [("", ["-m", "1", "-C", "4-5,7"]), ("-m", ["-C", "4-5,7"]), ("-C", [])])
def test_a_rank_is_bound_as_far_as_it_may_be(tmp_path, monkeypatch, denied, left):
    program = tmp_path / "numactl"
    program.write_text(NUMACTL)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("KMP_AFFINITY", raising=False)
    monkeypatch.setenv("DENIED", denied)
    monkeypatch.setenv("WHY", "Operation not permitted")
    expected = ["numactl", *left] if left else []
    assert numa.get_numactl_cmd("0-2,4-5,7", 2, 1) == (3, expected)
    monkeypatch.setenv("WHY", "no such node")
    if denied:
        with pytest.raises(RuntimeError, match="no such node"):
            numa.get_numactl_cmd("0-2,4-5,7", 2, 1)


@pytest.mark.parametrize("text", ["0,2-6,5-9", "8,2-6", "1,6-2", "a"])
def test_cores_ascend(text):
    assert numa.parse_range_list("0,2-4,6") == [0, 2, 3, 4, 6]
    with pytest.raises(ValueError, match=r"ascend|not end before|invalid literal"):
        numa.parse_range_list(text)


def test_timers_count_and_complain():
    timers = timer.SynchronizedWallClockTimer()
    timers("work").start()
    timers("work").stop()
    assert timers("work").elapsed() > 0
    assert timers.get_mean(["work", "other"]) == {"work": 0.0}
    enabled = SimpleNamespace(enabled=True, synchronized=False)
    for steps in (0, -1, 1.5):
        with pytest.raises(ValueError, match="positive integer"):
            timer.ThroughputTimer(enabled, 1, steps_per_output=steps)
    lines: list[str] = []
    samples = timer.ThroughputTimer(enabled, 4, start_step=1, steps_per_output=2, logging_fn=lines.append)
    for _ in range(4):
        samples.start()
        samples.stop(global_step=True)
    assert (len(lines), samples.global_step_count) == (2, 4)
    assert samples.avg_samples_per_sec() > 0


def test_every_operator_has_a_builder_that_says_what_it_does():
    assert op_builder.COMPATIBLE["fused_adam"]
    assert not op_builder.COMPATIBLE[op_builder.FusedLambBuilder.NAME]
    with pytest.raises(NotImplementedError, match=r"Use deepspeed\.ops\.adam\.FusedAdam"):
        op_builder.FusedAdamBuilder().load()
    flat = op_builder.UtilsBuilder().load().flatten([torch.ones(2), torch.zeros(3)])
    assert flat.tolist() == [1, 1, 0, 0, 0]


def test_a_model_parallel_unit_is_asked_by_each_of_its_names():
    class Slices:
        def get_slice_parallel_world_size(self) -> int:
            return 8

    assert bwc.bwc_tensor_model_parallel_world_size(Slices()) == 8
    assert (bwc.bwc_tensor_model_parallel_rank(Slices()), bwc.bwc_tensor_model_parallel_group(None)) == (0, None)


def test_small_helpers(capsys):
    debug.printflock("locked")
    assert capsys.readouterr().out == "locked\n"
    assert call_to_str("f", 1, "a", x=2) == "f(1, 'a', x=2)"
    assert required_torch_version(min_version=2.0)
    assert not required_torch_version(max_version="2.0")
    tensors = [torch.full((4,), 3.0), torch.full((4,), 4.0)]
    assert clip_tensors_by_global_norm(tensors, max_norm=1.0).item() == 10.0
    assert sum(float(tensor.square().sum()) for tensor in tensors) == pytest.approx(1.0, rel=1e-5)
