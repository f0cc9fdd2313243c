"""Every key of the schema has an effect, or causes a notice or a refusal."""

import ast
import math
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from onefold.config import Config, ConfigError, load_config
from onefold.config.keys import SectionKey, walk
from onefold.config.params import OPTIMIZERS, SCHEDULES, Coefficients

PACKAGE = Path(__file__).parents[2] / "onefold"
LEAVES = {path: entry for path, entry in walk(Config) if entry.section is None or entry.optional}
# What only describes the config, and reads a key to say something about it, is no reader.
SPEAKERS = {"keys.py", "support.py", "document.py", "read.py"}

# Keys that count in a config that says nothing else: stage 0, fp32, one process, no offload. All others are told.
COUNT_ALONE = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "managed_gradient_accumulation",
    "gradient_clipping",
    "prescale_gradients",
    "gradient_predivide_factor",
    "gradient_allreduce_op",
    "communication_data_type",
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "log_level",
    "dataloader_drop_last",
    "disable_python_gc",
    "zero_optimization.stage",
    "zero_optimization.overlap_comm",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.zero_quantized_gradients",
    "onefold.collective",
    "onefold.node_size",
    "onefold.node_sums_dtype",
    "onefold.units",
    "onefold.batch_chunks",
    "onefold.tiled_loss",
    "onefold.cuda_graphs",
    "onefold.metrics_address",
    "onefold.tiled_mlp",
    "sequence_parallel_size",
    "onefold.honour_writes",
    "onefold.nonfinite_gradients",
    "onefold.loss_spike.factor",
    "onefold.grad_norm_spike.factor",
    "onefold.replica_check_every",
    "onefold.reexecute_steps",
    "onefold.nccl_error_handling",
    "onefold.expert_parallel_size",
    "expert_parallel.enabled",
    "onefold.trace.steps",
    "onefold.trace.memory_snapshot",
    "onefold.stop.save_to",
    "onefold.stop.signals",
    "onefold.stall.seconds",
    "onefold.peer_copies.every",
    "onefold.report",
    "tensorboard.enabled",
    "csv_monitor.enabled",
    "wandb.enabled",
    "comet.enabled",
    "optimizer",
    "scheduler",
    "fp16.enabled",
    "bf16.enabled",
    "fp8.enabled",
    "torch_autocast.enabled",
    "data_types.grad_accum_dtype",
    "data_types.param_dtype",
    "data_types.buffer_dtype",
    "activation_checkpointing.contiguous_memory_optimization",
    "activation_checkpointing.cpu_checkpointing",
    "activation_checkpointing.synchronize_checkpoint_boundary",
    "activation_checkpointing.profile",
    "checkpoint.async_save",
    "checkpoint.private",
    "onefold.state_dtype",
    "checkpoint.keep_last",
    "checkpoint.tag_validation",
}


# Keys that are an error by themselves, and what the error names.
NEEDS_MORE = {
    "zero_optimization.cpu_offload": "offload_optimizer needs stage 1",
    "zero_optimization.offload_optimizer.device": "offload_optimizer needs stage 1",
    "fp16.fp16_master_weights_and_grads": "fp16.fp16_master_weights_and_grads needs zero_optimization.stage",
    "bf16.bf16_master_weights_and_grads": "bf16.bf16_master_weights_and_grads needs zero_optimization.stage",
    "elasticity.enabled": "elasticity.enabled needs elasticity.max_train_batch_size",
    "onefold.master_dtype": "onefold.master_dtype = bf16_int16 needs bf16 weights",
}


def another(entry: SectionKey) -> Any:
    """A value that the key takes and that is not its default."""
    hint = entry.hint
    if entry.section is not None:
        return (
            {"type": "AdamW"}
            if entry.name == "optimizer"
            else {"type": "WarmupLR"}
            if entry.name == "scheduler"
            else {}
        )
    if entry.is_free:
        return {"something": True} if entry.name not in ("arg_mappings",) else {"lr": "--lr"}
    if hint is bool:
        return not entry.default
    if get_origin(hint) is Literal:
        return next(choice for choice in get_args(hint) if choice != entry.default)
    if hint == Coefficients:
        return "polar_express"
    if get_origin(hint) is tuple and get_origin(get_args(hint)[0]) is Literal:
        return [get_args(get_args(hint)[0])[0]]
    if get_origin(hint) is tuple:
        return ["another"] if get_args(hint)[0] is str else [7] * len([kind for kind in get_args(hint) if kind is int])
    if hint is str:
        return "another"
    values: tuple[Any, ...] = (2, 3, 0.5, 0)
    return next(value for value in values if value != entry.default and fits(value, entry))


def fits(value: float, entry: SectionKey) -> bool:
    key = entry.key
    return (
        (entry.hint is float or value == int(value))
        and value >= (key.minimum if key.minimum is not None else -math.inf)
        and value > (key.above if key.above is not None else -math.inf)
        and value <= (key.maximum if key.maximum is not None else math.inf)
        and value < (key.below if key.below is not None else math.inf)
    )


def told(path: str, config: Config) -> bool:
    """Whether a line is about the key, or about the section that it stands in."""
    heads = {path.rsplit(".", back)[0] for back in range(path.count(".") + 1)}
    lines = (*config.notices, *config.refusals)
    return any(line.split(":")[0].split(" = ")[0] in heads for line in lines)


@pytest.mark.parametrize("path", LEAVES)
def test_a_key_counts_alone_or_is_told_that_it_does_not(path: str) -> None:
    entry = LEAVES[path]
    if path.startswith(
        ("optimizer.", "scheduler.", "zero_optimization.zenflow.", "zero_optimization.zeropp_loco_param.")
    ):
        pytest.skip("a section that is not there unless it is asked for")
    if path in NEEDS_MORE:
        with pytest.raises(ConfigError, match=NEEDS_MORE[path]):
            load_config({path: another(entry)})
        return
    config = load_config({path: another(entry)})
    assert told(path, config) == (path not in COUNT_ALONE), (config.notices, config.refusals)


@pytest.mark.parametrize("path", [path for path, entry in LEAVES.items() if entry.key.switch is not None])
@pytest.mark.parametrize("off", [False, True])
def test_a_key_whose_switch_is_off_is_told_which(path: str, off: bool) -> None:
    """Whether the switch is left out or says no."""
    entry = LEAVES[path]
    section = path.rpartition(".")[0]
    switch = f"{section}.{entry.key.switch}"
    base: dict[str, Any] = {"zero_optimization.stage": 3}
    if off:
        base[switch] = {"device": "none", "keep_last": None, "steps": None}.get(switch.rpartition(".")[2], False)
    config = load_config({**base, path: another(entry)})
    lines = [line for line in config.notices if line.split(":")[0].split(" = ")[0] == path]
    assert any(switch in line or entry.key.notice is not None for line in lines), config.notices


@pytest.mark.parametrize("path", [path for path, entry in LEAVES.items() if entry.key.from_stage])
def test_a_key_that_some_stages_read_is_told_in_the_others(path: str) -> None:
    entry = LEAVES[path]
    value = [2, "/a"][path.endswith("nvme_path")] if path.endswith(("mics_shard_size", "nvme_path")) else another(entry)
    for stage in range(entry.key.from_stage):
        config = load_config({"zero_optimization.stage": stage, path: value})
        assert any(line.startswith(path) and "below stage" in line for line in config.notices), config.notices


def attributes_read() -> set[str]:
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name == "config" and path.name in SPEAKERS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
    return found


def test_a_key_that_is_honoured_is_read_by_something() -> None:
    """By its name, at least: a key that nobody reads any more has to become a notice."""
    reads = attributes_read()
    silent = []
    for path, entry in LEAVES.items():
        key = entry.key
        parent = LEAVES.get(path.rpartition(".")[0])
        switch = LEAVES.get(f"{path.rpartition('.')[0]}.{key.switch}")
        refused_with = (parent is not None and parent.key.refused) or (switch is not None and switch.key.refused)
        if not (key.notice or key.refused or key.same_as or refused_with) and entry.name not in reads:
            silent.append(path)
    assert silent == []


@pytest.mark.parametrize(
    ("section", "name", "kind"),
    [
        *(("optimizer", name, kind) for name, kind in OPTIMIZERS.items()),
        *(("scheduler", name, kind) for name, kind in SCHEDULES.items()),
    ],
)
def test_every_parameter_of_a_config_is_taken_or_told(section: str, name: str, kind: type) -> None:
    rules = "".join(
        (PACKAGE / "optim" / f"{file}.py").read_text() for file in ("rules", "matrix_rules", "matrix_groups")
    )
    for path, entry in walk(kind, f"{section}.params"):
        given: dict[str, Any] = {entry.name: [0.5, 0.6] if entry.name == "betas" else another(entry)}
        if entry.name == "nesterov":
            given["momentum"] = 0.9
        config = load_config({section: {"type": name, "params": given}})
        kept = getattr(config, section).params
        assert kept[entry.name] != entry.default
        lines = [line for line in (*config.notices, *config.refusals) if line.startswith(path)]
        if entry.key.notice or entry.key.refused:
            assert len(lines) == 1, (path, config.notices)
        else:
            assert lines == []
            assert section == "scheduler" or f'"{entry.name}"' in rules, f"no rule reads {path}"
