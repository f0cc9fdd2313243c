"""The optimizer that `onefold.fsdp.offload` returns: torch's interface, with states in host memory.

[Note: the offloaded step under FSDP2]
FSDP2 keeps its sharded parameters and reduced gradients on the device, and this optimizer leaves them there. So
clipping, gradient accumulation, gradient scalers and everything else that reads or writes `p.grad` work as before. Only
the optimizer states, and the fp32 masters of 16-bit parameters, are in page-locked host memory. `step()` streams them
through the GPU ([Note: states streamed through the GPU]): a chunk of states is copied to the device, stepped by torch's
fused kernel together with the parameter and its gradient in place, and copied back, while the next chunk is copied to
the device. A step is bound by the bus: 8 bytes per fp32 parameter and direction with Adam.

The kernel is that of `torch.optim.AdamW(fused=True)`, so results are bit-equal to that optimizer without offload,
whatever the ratio.

`step()` returns when the parameters are updated. With `non_blocking=True` it returns at once, and the forward of each
FSDP2 module waits for its parameters, so that the rest of the step overlaps the forward.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial, wraps
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from onefold.fsdp.fsdp_modules import modules_gathered_with, parameters_by_module
from onefold.fsdp.parameter_states import ParameterStates, StatesView, local_tensor
from onefold.fsdp.state_placement import MIN_NUMEL, choose_offloaded, ratio_that_fits
from onefold.log import logger
from onefold.offload.bus import Bus
from onefold.offload.host_memory import HostShortage, available_bytes
from onefold.offload.param_shard import Publisher
from onefold.optim.gpu_stream import CHUNK_BYTES, IN_FLIGHT, GpuStream, StreamedShard
from onefold.optim.pipeline import ElementwiseUpdate, StepValues
from onefold.optim.rules import Hyper, Rule
from onefold.plan.state_formats import StateFormats
from onefold.runtime.torch_internals import outside_compiler

# Methods of the user's optimizer that are forwarded, so that code that still holds it works.
_FORWARDED = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")
# The hooks of the user's optimizer, which are called for this one.
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class OffloadedOptimizer(torch.optim.Optimizer):
    """An optimizer of FSDP2 parameters whose states are in host memory. Make it with `onefold.fsdp.offload`.

    `param_groups` are those of the given optimizer, so schedulers of either of them work.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        rule_name: str,
        rule: Rule,
        ratio: float | Literal["auto"],
        formats: StateFormats,
        device_memory: float | None,
        *,
        non_blocking: bool,
    ) -> None:
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._rule, self._formats = rule, formats
        # torch's SGD counts no steps.
        self._counts_steps = rule_name != "sgd"
        self._ratio, self._device_memory = ratio, device_memory
        self._stores: dict[nn.Parameter, ParameterStates] = {}
        # Grows with `param_groups`. The pipeline reads the rule of each group.
        self._rules: list[Rule] = []
        self._is_decided = False
        # The shards that the thread of a non-blocking step has not finished.
        self._under_way: dict[ParameterStates, Future[None]] = {}
        self._failed: BaseException | None = None
        saved = optimizer.state_dict() if optimizer.state else None
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups
        for name in _HOOKS:
            setattr(self, name, getattr(optimizer, name))
        self._device = next(iter(self._stores)).device
        self._copied: Counter[str] = Counter()
        self._bus = Bus(self._device, partial(_count, self._copied))
        self._elementwise = ElementwiseUpdate(self._rules)
        self._stream = GpuStream(self._rules, self._bus) if self._bus.crosses else None
        if ratio != "auto":
            self._decide(ratio)
        elif self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        if saved is not None:
            self.load_state_dict(saved)
            optimizer.state.clear()
        self._thread = ThreadPoolExecutor(1, "onefold-fsdp") if non_blocking and self._bus.crosses else None
        if self._thread is not None:
            self._thread.submit(torch.cuda.set_device, self._device).result()
            self._wait_in_forwards(model)
        # The user's optimizer keeps this one alive. A reference back would keep both until a garbage collection.
        self._plain = weakref.ref(optimizer)
        self._forward_from(optimizer)
        optimizer.offloaded_by = self  # type: ignore[attr-defined]
        # A gradient scaler would leave the division by the scale to a fused step, which this one is not.
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]

    # -- groups ---------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Its states are offloaded by the same ratio."""
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        group = self.param_groups[number]
        self._rules.append(self._rule)
        for parameter in group["params"]:
            name = self._names.get(parameter, f"param_groups[{number}]")
            names = self._rule.state_names([group])
            store = ParameterStates(parameter, name, number, names, self._formats, counts_steps=self._counts_steps)
            self._stores[parameter] = store
            self.state[parameter] = StatesView(store, weakref.WeakMethod(self._wait_for))
        if self._is_decided:
            self._place()

    def _forward_from(self, optimizer: torch.optim.Optimizer) -> None:
        for name in _FORWARDED:
            method = getattr(optimizer, name)

            def call(_: Any, *args: Any, name: str = name, **kwargs: Any) -> Any:
                return getattr(self, name)(*args, **kwargs)

            forward = wraps(getattr(method, "__func__", method))(partial(call, None))
            forward.__func__ = call  # type: ignore[attr-defined] # a scheduler wraps `__func__` of a bound method
            setattr(optimizer, name, forward)

    # -- placement ------------------------------------------------------------------------------------------------

    @property
    def ratio(self) -> float | None:
        """The fraction of the states that is offloaded. None until "auto" has chosen it in the first step."""
        return self._ratio if self._is_decided and self._ratio != "auto" else None

    @property
    def host_bytes(self) -> int:
        """Bytes of masters and states in host memory."""
        return sum(store.num_bytes for store in self._stores.values() if store.is_placed and store.is_offloaded)

    @property
    def device_bytes(self) -> int:
        """Bytes of masters and states on the device."""
        return sum(store.num_bytes for store in self._stores.values() if store.is_placed and not store.is_offloaded)

    def _decide(self, ratio: float) -> None:
        self._ratio, self._is_decided = ratio, True
        self._place(moves=True)

    def _place(self, *, moves: bool = False) -> None:
        """Allocate the states that are not allocated yet. All ranks call this together if there are any.

        With `moves`, states that the ratio places elsewhere are moved. Until "auto" has decided, all are offloaded.
        """
        trained = [store for store in self._stores.values() if store.parameter.requires_grad]
        ratio = self._ratio if self._ratio != "auto" else 1.0
        offloaded = [True] * len(trained)  # the memory of a CPU rank is host memory
        if self._bus.crosses:
            offloaded = choose_offloaded([store.parameter.numel() for store in trained], ratio, MIN_NUMEL)
        placed = {
            store: offload for store, offload in zip(trained, offloaded, strict=True) if moves or not store.is_placed
        }
        if any(not store.is_placed for store in placed):
            self._check_host_memory(sum(s.num_bytes for s, offload in placed.items() if offload and not s.is_placed))
        for store, offload in placed.items():
            store.place(offload=offload)

    def _check_host_memory(self, num_bytes: int) -> None:
        """Raise on all ranks if those of a node need more host memory than is available."""
        self._largest_of_ranks(0.0)  # no rank allocates before all have counted what is available
        num_ranks, free = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())), available_bytes()
        if self._largest_of_ranks(num_bytes * num_ranks / free) > 1:
            raise HostShortage(
                f"onefold.fsdp.offload needs {num_bytes / 1e9:.2f} GB of host memory on each of {num_ranks} ranks, but "
                f'a node has less: this one {free / 1e9:.2f} GB. Use a smaller ratio, states="int8", or more nodes.'
            )

    def _decide_by_memory(self) -> None:
        """Choose the ratio from the device memory that the first backward needed. All ranks call this together."""
        ratio = 1.0
        if self._bus.crosses:
            free, _ = torch.cuda.mem_get_info(self._device)
            usable = free + torch.cuda.memory_reserved(self._device)
            if self._device_memory is not None:
                usable = min(usable, int(self._device_memory * 1e9))
            on_device = sum(store.num_bytes for store in self._stores.values() if store.parameter.requires_grad)
            peak = torch.cuda.max_memory_allocated(self._device) - self.device_bytes
            ratio = ratio_that_fits(on_device, usable, peak, IN_FLIGHT * CHUNK_BYTES)
        self._decide(self._largest_of_ranks(ratio))
        logger.info(
            "onefold.fsdp.offload: ratio %.2f, %.2f GB of optimizer states in host memory and %.2f GB on the device",
            self._ratio, self.host_bytes / 1e9, self.device_bytes / 1e9,
        )  # fmt: skip

    def _largest_of_ranks(self, value: float) -> float:
        """Return the largest value of all ranks that shard a parameter of this optimizer."""
        found = torch.tensor(value, dtype=torch.float64, device=self._device)
        parameters = [parameter for parameter in self._stores if isinstance(parameter, DTensor)]
        for mesh in dict.fromkeys(parameter.device_mesh for parameter in parameters):
            for dim in range(mesh.ndim):
                dist.all_reduce(found, dist.ReduceOp.MAX, group=mesh.get_group(dim))
        return float(found)

    # -- the step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.synchronize()
        if self._failed is not None:
            raise RuntimeError(
                f"an earlier step failed ({type(self._failed).__name__}: {self._failed}), so only some parameters are "
                "updated. Load a checkpoint into a new model and optimizer."
            ) from self._failed
        if not self._is_decided:
            self._decide_by_memory()
        elif any(not store.is_placed for store in self._with_gradients()):  # unfrozen since the last step
            self._place()
        hypers = [_values_of(group) for group in self.param_groups]
        steps = [(store, _flat_gradient(store), self._begin(store, hypers)) for store in self._with_gradients()]
        last_use = self._bus.now()
        streamed = {
            store: StreamedShard(store, gradient, Publisher(), values, last_use, store.model_weight)
            for store, gradient, values in steps
            if store.is_offloaded and store.num_bytes and self._stream is not None
        }
        if self._thread is not None:
            self._under_way = {store: Future() for store in streamed}
            self._thread.submit(self._stream_in_background, streamed, dict(self._under_way))
        for store, gradient, values in steps:
            if store not in streamed:
                window = store.window()
                self._elementwise.update(store, gradient, values, window, 0, window.stop, store.model_weight)
        if self._thread is None and streamed:
            self._stream_all(streamed)
        if (plain := self._plain()) is not None:
            # torch's schedulers warn unless they see that the optimizer they were made for has stepped.
            plain._opt_called = True  # type: ignore[attr-defined]
        return loss

    def _with_gradients(self) -> list[ParameterStates]:
        """Return the shards that are stepped."""
        return [store for parameter, store in self._stores.items() if parameter.grad is not None]

    def _begin(self, store: ParameterStates, hypers: Sequence[Hyper]) -> StepValues:
        """Count a step of one shard, and return its values."""
        store.num_steps += 1
        needed = self._rule.state_names([hypers[store.group]])
        begins = {store.group} if store.num_steps == 1 else set()
        if missing := [name for name in needed if name not in store.state_names]:
            store.add_states(missing)
            begins.add(store.group)
        return StepValues(store.num_steps, 1.0, hypers, begins=frozenset(begins))

    @torch.no_grad()
    def _stream_all(
        self,
        shards: Mapping[ParameterStates, StreamedShard],
        tasks: Mapping[ParameterStates, Future[None]] | None = None,
    ) -> None:
        """Stream the states of these shards through the GPU, and wait until all are in host memory again.

        The task of a shard is completed when its states are in host memory, and its parameter is updated.
        """
        assert self._stream is not None
        try:
            for store, shard in shards.items():
                then = partial(tasks[store].set_result, None) if tasks is not None else _nothing
                self._stream.start(shard, store.window(), then)
            self._stream.finish()
        except BaseException as error:
            self._failed = error
            self._stream.abandon()
            raise

    # -- non-blocking steps -----------------------------------------------------------------------------------------

    def _stream_in_background(
        self, shards: Mapping[ParameterStates, StreamedShard], tasks: Mapping[ParameterStates, Future[None]]
    ) -> None:
        try:
            self._stream_all(shards, tasks)
        except BaseException as error:
            for task in tasks.values():
                if not task.done():
                    task.set_exception(error)

    def synchronize(self) -> None:
        """Wait until the last step has updated all parameters. Without `non_blocking` it has when it returns."""
        self._wait_for(list(self._under_way))

    def _wait_for(self, stores: Iterable[ParameterStates]) -> None:
        for store in stores:
            if (task := self._under_way.get(store)) is not None:
                task.result()  # raises again in every later call, because the shard's task is not removed
                del self._under_way[store]

    def _wait_in_forwards(self, model: nn.Module) -> None:
        """Make the forward of each FSDP2 module wait for the parameters that it all-gathers."""
        owned = parameters_by_module(model)
        waited_for = {parameter for parameters in owned.values() for parameter in parameters}
        alone = [store.name for parameter, store in self._stores.items() if parameter not in waited_for]
        if alone:
            raise ValueError(
                f"onefold.fsdp.offload: {alone[0]} belongs to no fully_shard module, so no forward would wait for a "
                "non-blocking step of it. Call fully_shard on the whole model too, or leave out non_blocking."
            )

        @outside_compiler
        def wait(module: nn.Module, *_: Any) -> None:
            if self._under_way:
                for gathered in modules_gathered_with(module):
                    # A group that was added later has more parameters.
                    parameters = (parameter for parameter in owned.get(gathered, ()) if parameter in self._stores)
                    self._wait_for([self._stores[parameter] for parameter in parameters])

        for module in owned:
            # `fully_shard` has put its own hook first, so this one has to be put before it.
            module.register_forward_pre_hook(wait, prepend=True)
            module.register_state_dict_pre_hook(lambda *_: self.synchronize())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients. In-place zeroing waits until the last step has read them."""
        if not set_to_none:
            self.synchronize()
        super().zero_grad(set_to_none)

    @property
    def bytes_up(self) -> int:
        """Bytes that all steps have copied from the host to the device."""
        return self._copied["up"]

    @property
    def bytes_down(self) -> int:
        """Bytes that all steps have copied from the device to the host."""
        return self._copied["down"]

    # -- state dicts ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the states as torch's optimizer has them: DTensors of fp32 values, in host memory.

        16-bit parameters have the additional state `master`.
        """
        self.synchronize()
        self._place()
        live = self.state
        self.state = {  # type: ignore[assignment]
            parameter: {key: store.value(key) for key in store.keys}
            for parameter, store in self._stores.items()
            if store.is_placed
        }
        try:
            return super().state_dict()
        finally:
            self.state = live

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the states of this optimizer, or of the same torch optimizer without offload, from a state dict."""
        self.synchronize()
        self._place()
        groups, live = self.param_groups, self.state
        kept = [dict(group) for group in groups]
        super().load_state_dict({**state_dict, "state": {}})
        # The groups stay the same objects, because schedulers and the user's optimizer hold them.
        for group, before, loaded in zip(groups, kept, self.param_groups, strict=True):
            group.clear()
            group.update({**before, **loaded})
        self.param_groups, self.state = groups, live
        parameters = [parameter for group in groups for parameter in group["params"]]
        saved_ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        of_parameter = dict(zip(saved_ids, parameters, strict=True))
        saved = {of_parameter[index]: values for index, values in state_dict["state"].items()}
        for parameter, store in self._stores.items():
            if store.is_placed:  # not if it is frozen
                store.load(saved.get(parameter, {}))


def _values_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the hyperparameters of a group, as numbers: a scheduler may change them before the step ends."""
    return {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _flat_gradient(store: ParameterStates) -> torch.Tensor:
    gradient = store.parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise RuntimeError(f"the gradient of {store.name} is sparse. Use dense gradients.")
    return local_tensor(gradient).reshape(-1)


def _count(copied: Counter[str], way: str, num_bytes: int) -> None:
    copied[way] += num_bytes


def _nothing() -> None:
    """Do nothing after a window is in host memory again."""
