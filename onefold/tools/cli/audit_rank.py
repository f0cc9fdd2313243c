"""Run one rank of `onefold audit`: a user's script with another engine behind `initialize`, whose tensors are recorded.

Rank 0 writes `stepK.pt` after each step: the loss, the averaged gradient of each trained parameter, and all fp32
weights and buffers. Each rank writes `rankR.json`: checksums of the weights that its script has made, and the loss and
a checksum of each step.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
import onefold.start
import onefold.utils
import onefold.zero
from onefold.config import ConfigError, load_config, solve_batch
from onefold.config.read import ConfigSource
from onefold.tools.cli.audit_command import DEEPSPEED, FSDP2, ONEFOLD, PLAIN

# Sections that the audit replaces or leaves out: it computes in fp32, without offload, files and services.
_LEFT_OUT = ("bf16", "bfloat16", "fp16", "amp", "tensorboard", "wandb", "comet", "csv_monitor", "data_types", "onefold",
             "scheduler", "zero_optimization", "activation_checkpointing")  # fmt: skip
# Keys of a config that the audit replaces without an effect on results, or because of --stage.
_REPLACED = ("steps_per_print", "wall_clock_breakdown", "zero_optimization.stage")
_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}


def reduced(config: ConfigSource, stage: int) -> dict[str, Any]:
    """Return the config of a run on CPU ranks, in fp32 and in this stage, with nothing offloaded."""
    document = {key: value for key, value in load_config(config).raw.items() if key.partition(".")[0] not in _LEFT_OUT}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {**document, "zero_optimization": zero, "steps_per_print": 1 << 30, "wall_clock_breakdown": False}


def left_out(config: ConfigSource, stage: int) -> list[str]:
    """Return the keys of a config that `reduced` leaves out or changes, with dots."""
    kept = dict(_leaves(reduced(config, stage)))
    leaves = ((key, value) for key, value in _leaves(load_config(config).raw) if key not in _REPLACED)
    return [key for key, value in leaves if key not in kept or kept[key] != value]


def _leaves(section: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def torch_optimizer(section: Any, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a config in plain torch. DeepSpeed gets it, too, because its own one needs a compiler."""
    kind = str(section.type if section is not None else "").lower()
    if kind not in _OPTIMIZERS:
        raise ConfigError(f"optimizer.type {kind or '(missing)'}: the audit computes Adam, AdamW and SGD.")
    values = {"weight_decay": 0.0, **{name: value for name, value in section.params.items() if name != "torch_adam"}}
    if kind == "adam" and values.pop("adam_w_mode", True):  # DeepSpeed's Adam is AdamW
        kind = "adamw"
    made: torch.optim.Optimizer = getattr(torch.optim, _OPTIMIZERS[kind])(
        [each for _, each in _trained(model)], **values
    )
    return made


class PlainEngine(nn.Module):
    """The engine of the reference: the model in plain torch, with gradients averaged over ranks; or FSDP2."""

    def __init__(self, model: nn.Module, optimizer: Any, config: ConfigSource, *, is_fsdp: bool) -> None:
        super().__init__()
        settings = load_config(config)
        self.module, self.device = model, torch.device("cpu")
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.batch = solve_batch(settings, self.world_size)
        self._clip, self._passes, self._is_fsdp = settings.gradient_clipping, 0, is_fsdp
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, 0)
        if is_fsdp:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(model, mesh=init_device_mesh("cpu", (self.world_size,)))
        self.optimizer = optimizer(model.parameters()) if optimizer else torch_optimizer(settings.optimizer, model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        (loss / self.batch.accumulation).backward()

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self._passes + 1) % self.batch.accumulation == 0

    def average_gradients(self) -> None:
        """Average the gradients over ranks. A parameter that only some ranks use has zeros on the others."""
        for _, parameter in [] if self._is_fsdp else _trained(self.module):
            has = torch.tensor(float(parameter.grad is not None))
            dist.all_reduce(has)
            if has:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.world_size

    def step(self) -> None:
        """Clip gradients and update parameters at a boundary."""
        if self.is_gradient_accumulation_boundary():
            if self._clip:
                torch.nn.utils.clip_grad_norm_(self.module.parameters(), self._clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._passes += 1


class Audit:
    """The audit of this rank: makes the engine of a variant, and records its steps."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job, self._variant, self._folder = job, job["variant"], Path(job["folder"])
        self._losses: list[Tensor] = []
        self.record: dict[str, Any] = {"losses": [], "weights": []}

    def initialize(
        self,
        args: Any = None,
        model: nn.Module | None = None,
        optimizer: Any = None,
        model_parameters: Any = None,
        **others: Any,
    ) -> Any:
        """Take the place of `onefold.initialize` and `deepspeed.initialize`."""
        assert model is not None, "initialize needs a model"
        for name in ("training_data", "lr_scheduler"):
            if others.get(name) is not None:
                raise ConfigError(f"initialize({name}=...): the audit does not support it. Make it in the script.")
        if model_parameters is not None:
            _check_all_trained("model_parameters", model_parameters, model)
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer = _rebuilt(optimizer, model)
        sources = (
            self._job["config"],
            others.get("config"),
            others.get("config_params"),
            getattr(args, "deepspeed_config", None),
        )
        config = next((each for each in sources if each is not None), None)
        if config is None:
            raise ConfigError("the script passes no config to initialize. Give --config FILE.")
        onefold.init_distributed(dist_backend="gloo")
        if self._job["layers"] is not None:
            _truncate(model, self._job["layers"])
        model.float()
        settings = load_config(config)
        stage = settings.zero_optimization.stage if self._job["stage"] is None else self._job["stage"]
        start = {name: _checksum([each.data]) for name, each in model.named_parameters()}
        self.record |= {"never": [name for name, _ in _trained(model)], "notices": list(settings.notices)}
        self.record |= {"start": start, "stage": stage, "left_out": left_out(config, stage)}
        document = reduced(config, stage)
        if self._variant in (PLAIN, FSDP2):
            engine: Any = PlainEngine(model, optimizer, document, is_fsdp=self._variant == FSDP2)
        else:
            made = optimizer(model.parameters()) if optimizer is not None else None
            if made is None and self._variant == DEEPSPEED:
                made = torch_optimizer(settings.optimizer, model)
            extra = {"zero_allow_untested_optimizer": True} if self._variant == DEEPSPEED else {"log_level": "warning"}
            document = {key: value for key, value in document.items() if made is None or key != "optimizer"} | extra
            engine = _REAL["initialize"](model=model, optimizer=made, config=document)[0]
        tensors = {"weights": _weights(engine.module), "buffers": _buffers(engine.module)}
        if dist.get_rank() == 0:
            torch.save(tensors, self._folder / "step0.pt")
        self._wrap(engine)
        return engine, engine.optimizer, None, None

    def _wrap(self, engine: Any) -> None:
        """Record the steps of an engine."""
        backward, step = engine.backward, engine.step

        def recorded_backward(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._losses.append(loss.detach().float().reshape(()))
            return backward(loss, *args, **kwargs)

        def recorded_step(*args: Any, **kwargs: Any) -> None:
            if not engine.is_gradient_accumulation_boundary():
                step(*args, **kwargs)
                return
            if isinstance(engine, PlainEngine):
                engine.average_gradients()
            found = {name: _REAL["gradient"](each) for name, each in _trained(engine.module)}
            self.record["never"] = [name for name in self.record["never"] if found[name] is None]
            gradients = {name: torch.zeros(()) if each is None else _whole(each) for name, each in found.items()}
            step(*args, **kwargs)
            self._write(gradients, _weights(engine.module), _buffers(engine.module))

        engine.backward, engine.step = recorded_backward, recorded_step

    def _write(self, gradients: dict[str, Tensor], weights: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        loss, rank = torch.stack(self._losses).mean() if self._losses else torch.tensor(float("nan")), dist.get_rank()
        self.record["losses"].append(float(loss))
        self.record["weights"].append(_checksum(weights.values()))
        self._losses, number = [], len(self.record["losses"])
        dist.all_reduce(loss)
        if rank == 0:
            found = {"loss": float(loss) / dist.get_world_size(), "gradients": gradients}
            torch.save({**found, "weights": weights, "buffers": buffers}, self._folder / f"step{number}.pt")
        if number == self._job["steps"]:
            (self._folder / f"rank{rank}.json").write_text(json.dumps(self.record))
            dist.barrier()
            raise SystemExit(0)


# Functions of the variant: `initialize`, those that return the gradient and the fp32 weight of a Parameter, and the
# context in which a Parameter is unsharded.
_REAL: dict[str, Callable[..., Any]] = {
    "gradient": lambda parameter: parameter.grad, "weight": lambda parameter: None,
    "gathered": lambda parameter: nullcontext(),
}  # fmt: skip


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the fp32 weights of all parameters, also of frozen ones."""
    return {name: _weight(each) for name, each in model.named_parameters()}


def _weight(parameter: nn.Parameter) -> Tensor:
    master = _REAL["weight"](parameter) if parameter.requires_grad else None
    if master is not None:
        return _whole(master)
    with _REAL["gathered"](parameter):
        return _whole(parameter.data)


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: _whole(each) for name, each in model.named_buffers()}


def _whole(tensor: Tensor) -> Tensor:
    full = getattr(tensor, "full_tensor", None)  # of FSDP2's DTensors
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return (full() if full is not None else tensor).detach().float().cpu().clone()


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, each) for name, each in model.named_parameters() if each.requires_grad]


def _checksum(tensors: Any) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().float().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def _check_all_trained(argument: str, given: Any, model: nn.Module) -> None:
    """Raise ConfigError unless these are all trained parameters of the model, without groups."""
    parameters = list(given)
    is_plain = all(isinstance(each, nn.Parameter) for each in parameters)
    if not is_plain or {each for each in parameters if each.requires_grad} != {each for _, each in _trained(model)}:
        raise ConfigError(
            f"initialize({argument}=...) has {'other parameters than the model trains' if is_plain else 'groups'}. The "
            "audit trains all parameters with requires_grad, in one group. Pass model.parameters(), and freeze the "
            "others with requires_grad_(False)."
        )


def _rebuilt(optimizer: torch.optim.Optimizer, model: nn.Module) -> Callable[[Any], torch.optim.Optimizer]:
    if len(optimizer.param_groups) != 1:
        raise ConfigError("the audit does not support an optimizer with several groups. Pass the optimizer section.")
    _check_all_trained("optimizer", optimizer.param_groups[0]["params"], model)
    values = {name: value for name, value in optimizer.param_groups[0].items() if name in optimizer.defaults}
    return lambda parameters: type(optimizer)([each for each in parameters if each.requires_grad], **values)


def _truncate(model: nn.Module, layers: int) -> None:
    """Keep the first layers of the longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ConfigError(f"--layers {layers}: the model has no ModuleList of layers. Leave it out.")
    longest = max(lists, key=len)
    del longest[layers:]
    config: Any = getattr(model, "config", None)
    if hasattr(config, "num_hidden_layers"):
        config.num_hidden_layers = len(longest)


def train_gpt() -> None:
    """Train the built-in GPT in its smallest size, for an audit without a script."""
    from onefold.tools.train.gpt import GPT, PRESETS

    engine: Any = onefold.initialize(model=GPT(PRESETS["tiny"]))[0]
    generator = torch.Generator().manual_seed(dist.get_rank())
    while True:
        tokens = torch.randint(0, 256, (2, 33), generator=generator)
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
        engine.step()


def main() -> None:
    """Run the script of the job that the first argument describes."""
    job = json.loads(sys.argv[1])
    if job["variant"] != DEEPSPEED:
        onefold.register_as_deepspeed()
    deepspeed: Any = importlib.import_module("deepspeed")
    if job["variant"] in (ONEFOLD, DEEPSPEED):
        real: Any = deepspeed if job["variant"] == DEEPSPEED else onefold
        _REAL.update(gradient=real.utils.safe_get_full_grad, weight=real.utils.safe_get_full_fp32_param)
        _REAL.update(initialize=real.initialize, gathered=real.zero.GatheredParameters)
    audit = Audit(job)
    for module in (deepspeed, onefold, onefold.start):
        vars(module)["initialize"] = audit.initialize
    for module in (deepspeed.zero, onefold.zero):  # all variants begin with the same whole model
        vars(module)["Init"] = lambda *args, **kwargs: nullcontext()
    torch.manual_seed(0)
    if job["script"] is None:
        train_gpt()
    sys.argv = [job["script"], *job["arguments"]]
    sys.path[0] = os.path.dirname(os.path.abspath(job["script"]))
    runpy.run_path(job["script"], run_name="__main__")
    done = len(audit.record["losses"])
    raise RuntimeError(f"the script ended after {done} of {job['steps']} optimizer steps. Give --steps {max(done, 1)}.")


if __name__ == "__main__":
    main()
