"""Make an engine, its optimizer, its loader and its scheduler from a model and a config."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from glob import escape
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from onefold import checkpointing
from onefold.allocator import give_back_free_memory
from onefold.comm import (
    assert_same_on_all_ranks,
    data_group,
    init_distributed,
    local_device,
    num_comparisons,
    world_detector,
)
from onefold.comm.wait_notes import INITIALIZE
from onefold.config import (
    Config,
    ConfigError,
    check_built,
    check_topology,
    load_config,
    solve_batch,
    with_expert_parallel_size,
)
from onefold.config.read import ConfigSource
from onefold.engine import Engine
from onefold.engine.rank_consistency import facts_to_compare
from onefold.engine.step_reports import check_reports
from onefold.fp8 import unwrap_weights
from onefold.log import logger, set_up_logging
from onefold.moe import requested_parallel_size
from onefold.optim.choose import Optimizers, choose, fit_to_plan
from onefold.optim.chosen import ChosenOptimizer
from onefold.optim.schedules import prepare_scheduler
from onefold.optim.sharded import ShardedOptimizer
from onefold.plan import make_plan, plan_every_stage, plan_with_less


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizers = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: ConfigSource | None = None,
    mesh_param: Any = None,
    config_params: ConfigSource | None = None,
    *,
    engine_class: type[Engine] = Engine,
    read_config: Callable[[Any], Config] = load_config,
) -> tuple[Engine, ShardedOptimizer | None, DataLoader[Any] | None, Any]:
    """Shard a model as its config says, and return `(engine, optimizer, dataloader, lr_scheduler)`.

    All ranks call this together. The process group is created if there is none, and the model is moved to the device
    of the rank. `config` is a dict or the path of a JSON or YAML file; `args.deepspeed_config` and `config_params`
    are other ways to give it.

    `optimizer` is a torch optimizer, a callable that takes the parameters, a list with torch's Muon and AdamW, or None
    for the optimizer of the config. With neither, the engine only evaluates. `model_parameters` are the parameters or
    groups to train, by default all that require gradients. `lr_scheduler` is a scheduler or a callable that takes the
    optimizer. `training_data` is a dataset, for which a dataloader with `collate_fn` is returned; its position is
    saved in checkpoints. `mpu` and `mesh_param` ask for sequence parallelism as in DeepSpeed. `engine_class` and
    `read_config` are for `deepspeed.initialize`.
    """
    if model is None:
        raise ConfigError("initialize needs a model. Pass model=.")
    if dist.is_initialized():
        world_detector()  # reports to the ranks that wait in `initialize` if this one ends before it joins them
    settings = _with_mesh(read_config(_config_source(args, config, config_params)), mpu, mesh_param)
    settings = with_expert_parallel_size(settings, requested_parallel_size(model))
    check_built(settings)
    init_distributed(
        distributed_port=distributed_port,
        dist_init_required=dist_init_required,
        nccl_error_handling=settings.onefold.nccl_error_handling,
    )
    world, is_first = world_detector().size, world_detector().rank == 0
    check_topology(settings, world)
    _check_mesh(mpu, mesh_param, settings.sequence_parallel_size)
    set_up_logging(settings.log_level, speaks=is_first)
    _log_notices(settings.notices, speaks=is_first)
    checkpointing.read_config(settings)

    given = list(model_parameters) if model_parameters is not None else []
    given = unwrap_weights(model, optimizer, given)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer is not None and settings.optimizer is not None:
        unread = "optimizer: the section is ignored, because an optimizer was passed to initialize"
        _log_notices([unread], speaks=is_first)
        settings = replace(settings, optimizer=None)
    plan = make_plan(settings, world)
    chosen = choose(optimizer, plan.optimizer, given or trained, model)
    if chosen is not None and chosen.low_bits is not None:
        settings = _with_low_bits(settings, chosen, model)
        plan = make_plan(settings, world)
    build_scheduler = None
    if plan.scheduler is not None and lr_scheduler is None:
        build_scheduler = prepare_scheduler(plan.scheduler)
    _log_notices(_ignored_sections(settings, lr_scheduler, chosen), speaks=is_first)
    if is_first:
        check_reports(plan.loop)
    if chosen is not None:
        chosen = fit_to_plan(chosen, plan)
    batch = solve_batch(settings, world)
    _log_notices(batch.notices, speaks=is_first)
    number = num_comparisons() + 1
    if world > 1:
        assert_same_on_all_ranks(
            f"{INITIALIZE}, engine {number}", facts_to_compare(model, settings, plan, batch, chosen, lr_scheduler)
        )
    group, others = data_group(plan.node_size, plan.num_replicas), plan_every_stage(settings, world)
    engine = engine_class(
        model,
        plan,
        batch,
        chosen,
        group,
        local_device(),
        config=settings.raw,
        other_plans=others,
        plans_with_less=plan_with_less(
            settings, world, takes_formats=chosen is not None and not chosen.runs_user_class
        ),
    )
    engine.lr_scheduler = _scheduler(lr_scheduler, build_scheduler, engine.optimizer)
    if training_data is not None:
        engine.training_dataloader = engine.state.make_loader(training_data, collate_fn=collate_fn)
    give_back_free_memory()
    if is_first:
        for line in engine.describe().splitlines():
            logger.info("%s", line)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the arguments that DeepSpeed scripts declare: --deepspeed, --deepspeed_config, --local_rank."""
    group = parser.add_argument_group("onefold", "arguments of DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="use onefold.initialize (flag for the script)")
    group.add_argument("--deepspeed_config", metavar="FILE", help="JSON config for onefold.initialize")
    if not any("--local_rank" in action.option_strings for action in parser._actions):
        group.add_argument("--local_rank", type=int, default=-1, help="ignored; ranks are read from the environment")
    return parser


def _config_source(args: Any, config: ConfigSource | None, config_params: ConfigSource | None) -> ConfigSource:
    """Return the one config among the arguments of `initialize`."""
    from_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)  # the older name
    given = [source for source in (config, config_params, from_args) if source is not None]
    if not given:
        raise ConfigError(
            "no config is given. Pass config= (a dict or a path), or --deepspeed_config on the command line."
        )
    if config is not None and from_args is not None and config != from_args:
        raise ConfigError(f"two configs are given: config= and --deepspeed_config {from_args}. Pass one of them.")
    return given[0]


def _with_mesh(settings: Config, mpu: Any, mesh_param: Any) -> Config:
    """Return the config with the sequence parallelism that DeepSpeed's arguments `mpu` or `mesh_param` ask for.

    `mpu` is an object with Megatron's methods, `mesh_param` the numbers of ranks for data and for one sequence.
    """
    sizes = {
        name: method()
        for name in ("tensor_model_parallel", "model_parallel", "pipe_parallel", "sequence_parallel")
        if (method := getattr(mpu, f"get_{name}_world_size", None)) is not None
    }
    size = sizes.pop("sequence_parallel", 1)
    others = [name for name, other in sizes.items() if other != 1]
    if others or (mpu is not None and size == 1 and not sizes):
        raise ValueError(f"mpu: {', '.join(others) or type(mpu).__name__} is not supported. Leave mpu out.")
    if mesh_param is not None:
        size = tuple(mesh_param)[1]
    given = settings.sequence_parallel_size
    if size != 1 and given not in (1, size):
        raise ValueError(f"sequence_parallel_size is {given} in the config, but {size} in mpu or mesh_param. Use one.")
    return replace(settings, sequence_parallel_size=max(size, given))


def _check_mesh(mpu: Any, mesh_param: Any, size: int) -> None:
    """Raise unless the ranks of a sequence in DeepSpeed's arguments are neighbours, as in `sequence_group`."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if mesh_param is not None and math.prod(mesh_param) != world:
        raise ValueError(
            f"mesh_param = {tuple(mesh_param)} is not a mesh of the {world} ranks of this job. Pass "
            f"({world // size}, {size})."
        )
    rank_of_sequence = getattr(mpu, "get_sequence_parallel_rank", None)
    if rank_of_sequence is not None and rank_of_sequence() != rank % size:
        raise ValueError(
            f"mpu: rank {rank} computes part {rank_of_sequence()} of its sequences, but {size} neighbouring ranks must "
            f"compute parts 0 to {size - 1}. Divide the ranks in this order, or set sequence_parallel_size instead."
        )


def _log_notices(notices: Iterable[str], *, speaks: bool) -> None:
    """Log notices about the config if this rank speaks for all."""
    for notice in notices if speaks else ():
        logger.info("config: %s", notice)


def _with_low_bits(settings: Config, chosen: ChosenOptimizer, model: nn.Module) -> Config:
    """Return the config with the state format of the optimizer class that the user has passed."""
    found = chosen.low_bits
    if found is None or not found.is_8bit:
        return settings
    default = Config().onefold
    if settings.state_dtype == "bf16" or settings.onefold.int8_min_numel not in (
        default.int8_min_numel,
        found.min_numel,
    ):
        raise ConfigError(
            f"optimizer {chosen.name} keeps 8-bit states for parameters of {found.min_numel} elements or more, but the "
            f"config has {settings.state_dtype} states (onefold.state_dtype, bf16.bf16_optimizer_states) and "
            f"onefold.int8_min_numel = {settings.onefold.int8_min_numel}. Leave them out, or change the optimizer."
        )
    wanted = {id(parameter) for parameter in found.fp32_parameters}
    names = tuple(escape(name) for name, parameter in model.named_parameters() if id(parameter) in wanted)
    own = settings.onefold
    own = replace(
        own,
        state_dtype="int8",
        int8_min_numel=found.min_numel,
        fp32_state_names=(*own.fp32_state_names, *names),
    )
    return replace(settings, onefold=own)


def _ignored_sections(settings: Config, lr_scheduler: Any, chosen: ChosenOptimizer | None) -> Iterator[str]:
    """Yield a notice for each section of the config that the arguments of `initialize` make ineffective."""
    if settings.scheduler is not None and lr_scheduler is not None:
        yield "scheduler: the section is ignored, because an lr_scheduler was passed to initialize"
    own_class = chosen is not None and (not chosen.rules or chosen.has_matrices)
    if own_class and settings.onefold.offloaded_step in ("device", "both"):
        yield "onefold.offloaded_step: the GPU runs only onefold's elementwise optimizers; the host updates the rest"
    if chosen is not None and chosen.is_paged:
        yield "optimizer: paged states are stored on the device; set zero_optimization.offload_optimizer to offload"
    if chosen is None and (settings.scheduler is not None or lr_scheduler is not None):
        yield "scheduler: the section is ignored, because there is no optimizer"


def _scheduler(given: Any, build_scheduler: Callable[[Any], Any] | None, optimizer: ShardedOptimizer | None) -> Any:
    """Return the scheduler that was passed, or that of the config; None without an optimizer."""
    if optimizer is None:
        return None
    if given is not None:
        return given(optimizer) if callable(given) and not hasattr(given, "step") else given
    return build_scheduler(optimizer.optimizer) if build_scheduler is not None else None
