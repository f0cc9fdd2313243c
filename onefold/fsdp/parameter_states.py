"""The master weight and optimizer states of this rank's shard of one FSDP2 parameter.

[Note: which tensor is the master]
FSDP2 stores a shard of every parameter on the device. If it is fp32 (the usual case, with `MixedPrecisionPolicy` for
the computation), it is the master weight itself, and no second copy exists. A 16-bit parameter has an fp32 master next
to its states. Its bits are the rounded master from one step to the next. An element that the program has written since
is not, and replaces the master's value ([Note: a write that no counter shows]).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from onefold.offload.buffer import Buffer
from onefold.offload.host_memory import page_aligned
from onefold.offload.state_codec import Dither
from onefold.offload.write_check import WriteCheck
from onefold.optim.pipeline import StateWindow
from onefold.plan.layout import Segment, round_up
from onefold.plan.state_formats import StateFormat, StateFormats

# The key of the master weight in a state dict.
MASTER_KEY = "master"
# The key of the number of steps, as in torch's optimizers.
STEP_KEY = "step"
_ALIGNMENT = 256


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or a plain tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local()  # the shard itself, not an alias


@dataclass(frozen=True)
class _Planned:
    """A master or state that is not allocated yet."""

    dtype: torch.dtype
    format: StateFormat | None

    def parts(self, numel: int) -> list[tuple[int, torch.dtype]]:
        """Return the elements and the dtype of each part. Encoded values have whole blocks."""
        if self.format is None:
            return [(numel, self.dtype)]
        whole = round_up(numel, self.format.block)
        return [(part.numel(whole), part.dtype) for part in self.format.parts]


class StatesView(Mapping[str, torch.Tensor]):
    """The states of a parameter as `optimizer.state[parameter]` shows them: read from where they are stored.

    `wait` returns when the last step has updated them.
    """

    def __init__(
        self, store: ParameterStates, wait: weakref.WeakMethod[Callable[[list[ParameterStates]], None]]
    ) -> None:
        self._store, self._wait = store, wait

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in self._store.keys:
            raise KeyError(key)
        if (wait := self._wait()) is not None:
            wait([self._store])
        if not self._store.is_placed:
            self._store.place(offload=True)
        return self._store.value(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._store.keys)

    def __len__(self) -> int:
        return len(self._store.keys)


class ParameterStates:
    """The master and states of one parameter's shard, in host memory or on the device.

    `names` are the states of its optimizer group's rule. Nothing is allocated until `place` is called. `counts_steps`
    says whether the number of steps is one of the states, as in most of torch's optimizers.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        name: str,
        group: int,
        names: Sequence[str],
        formats: StateFormats,
        *,
        counts_steps: bool,
    ) -> None:
        self.parameter, self.name, self.group = parameter, name, group
        self.num_steps = 0
        self._counts_steps = counts_steps
        self.is_offloaded = False
        self.is_placed = False
        self.formats = formats
        self._numel = local_tensor(parameter).numel()
        # In the order of a streamed chunk: the master first. Absent if the parameter is its own master.
        self._planned: dict[str, _Planned] = {}
        self._buffers: dict[str, Buffer] = {}
        if not self.is_its_own_master:
            self._planned[MASTER_KEY] = _Planned(torch.float32, None)
        for state in names:
            self._planned[state] = self._plan(state)

    def _plan(self, state: str) -> _Planned:
        dtype = self.parameter.dtype
        # The format depends on the size of the whole parameter, so that it is the same on all ranks.
        format = self.formats.of_state(state, self.name, dtype, self.parameter.numel())
        return _Planned(dtype if self.is_its_own_master else torch.float32, format)

    @property
    def is_its_own_master(self) -> bool:
        """Whether the parameter is the master weight. See [Note: which tensor is the master]."""
        return self.parameter.dtype.itemsize >= 4

    @property
    def num_bytes(self) -> int:
        """Bytes of the master and the states of this rank's shard."""
        return sum(
            numel * dtype.itemsize for plan in self._planned.values() for numel, dtype in plan.parts(self._numel)
        )

    @property
    def state_names(self) -> list[str]:
        """The names of the optimizer states."""
        return [name for name in self._planned if name != MASTER_KEY]

    # -- memory ---------------------------------------------------------------------------------------------------

    def place(self, *, offload: bool) -> None:
        """Allocate the master and the states in host memory or on the device, or move them there.

        Host memory is page-locked if the device is a GPU.
        """
        if self.is_placed and offload == self.is_offloaded:
            return
        device = torch.device("cpu") if offload else self.parameter.device
        wanted = {name: plan.parts(self._numel) for name, plan in self._planned.items()}
        memory = self._allocate([part for parts in wanted.values() for part in parts], device)
        placed = {
            name: Buffer([memory.pop(0) for _ in parts], self._numel, self._planned[name].format)
            for name, parts in wanted.items()
        }
        for name, buffer in placed.items():
            if name in self._buffers:
                for target, source in zip(buffer.tensors, self._buffers[name].tensors, strict=True):
                    target.copy_(source)
            elif name == MASTER_KEY:
                buffer.store(self.weight.to(torch.float32))
        self._buffers, self.is_offloaded, self.is_placed = placed, offload, True

    def _allocate(self, parts: list[tuple[int, torch.dtype]], device: torch.device) -> list[torch.Tensor]:
        if device.type != "cpu":
            return [torch.zeros(numel, dtype=dtype, device=device) for numel, dtype in parts]
        starts, end = [], 0
        for numel, dtype in parts:
            starts.append(end)
            end = round_up(end + numel * dtype.itemsize, _ALIGNMENT)
        block = page_aligned(end, pinned=self.parameter.is_cuda)
        return [
            block[start : start + numel * dtype.itemsize].view(dtype)
            for start, (numel, dtype) in zip(starts, parts, strict=True)
        ]

    def add_states(self, names: Sequence[str]) -> None:
        """Allocate states that a changed hyperparameter requires, all zero, next to the others."""
        for name in names:
            plan = self._planned[name] = self._plan(name)
            device = torch.device("cpu") if self.is_offloaded else self.parameter.device
            self._buffers[name] = Buffer(self._allocate(plan.parts(self._numel), device), self._numel, plan.format)

    # -- the step -------------------------------------------------------------------------------------------------

    @property
    def weight(self) -> torch.Tensor:
        """This rank's shard of the parameter, flat. FSDP2 may replace its memory before the first forward."""
        local = local_tensor(self.parameter)
        if not local.is_contiguous():
            raise RuntimeError(f"the shard of {self.name} is not contiguous. Shard the parameter on dimension 0.")
        return local.view(-1)

    @property
    def model_weight(self) -> torch.Tensor | None:
        """The parameter's shard, if the master is another tensor."""
        return None if self.is_its_own_master else self.weight

    @property
    def compared_model_weight(self) -> torch.Tensor | None:
        """The parameter's shard, if writes to it must be copied into the master."""
        return self.model_weight

    def window(self) -> StateWindow:
        """Return the whole shard as a window of the step pipeline."""
        master = self._buffers.get(MASTER_KEY) or Buffer.of(self.weight)
        return StateWindow(0, self._numel, master, {name: self._buffers[name] for name in self.state_names})

    def stepped_segments(self, first: int, last: int) -> list[Segment]:
        """Return the range as a segment of this parameter's optimizer group."""
        return [Segment(self.group, first, last)] if first < last else []

    def rounded_ranges(self, first: int, last: int, step: int) -> list[tuple[int, int, Dither | None]]:
        """Return the range in one piece. No format here is rounded stochastically."""
        return [(first, last, None)]

    # -- state dicts ----------------------------------------------------------------------------------------------

    @property
    def keys(self) -> list[str]:
        """The names of the values in a state dict."""
        return [*([STEP_KEY] if self._counts_steps else []), *self._planned]

    def value(self, key: str) -> torch.Tensor:
        """Return the step number, or a state as a tensor of the parameter's kind in host memory.

        An unencoded state in host memory is returned itself, any other as a copy.
        """
        if key == STEP_KEY:
            return torch.tensor(float(self.num_steps), dtype=torch.float32)
        buffer = self._buffers[key]
        if key == MASTER_KEY and buffer.numel():
            WriteCheck().take_over(buffer.tensor, self.weight.to(buffer.device))
        return self._like_parameter(buffer.fetch().cpu())

    def load(self, values: Mapping[str, Any]) -> None:
        """Copy the values of a state dict. A missing master is taken from the parameter."""
        values = {key: value for key, value in values.items() if value is not None}  # SGD without momentum
        if unknown := values.keys() - self._planned.keys() - {STEP_KEY, MASTER_KEY}:
            raise ValueError(
                f"the state of {self.name} has {', '.join(sorted(map(str, unknown)))}, which this optimizer does not "
                f"have. It has {', '.join(self.state_names) or 'no states'}."
            )
        # A class that counts no steps has states only after its first one.
        self.num_steps = int(values[STEP_KEY]) if STEP_KEY in values else int(bool(values))
        for name, buffer in self._buffers.items():
            if name in values:
                buffer.store(self._local(name, values[name]))
            elif name == MASTER_KEY:
                buffer.store(self.weight.to(torch.float32))
            elif self.num_steps:
                raise ValueError(f"the state of {self.name} has no {name}. Load a state dict of the same optimizer.")
            else:  # saved before the first step
                buffer.store(torch.zeros(buffer.numel(), dtype=buffer.dtype))

    def _local(self, name: str, value: torch.Tensor) -> torch.Tensor:
        local, parameter = local_tensor(value), self.parameter
        is_sharded_alike = getattr(value, "placements", None) == getattr(parameter, "placements", None)
        if not is_sharded_alike or local.shape != local_tensor(parameter).shape:
            raise ValueError(
                f"the state {name} of {self.name} is sharded differently: the shard has shape {tuple(local.shape)}, "
                f"but the parameter's has {tuple(local_tensor(parameter).shape)}. Load the state dict with "
                "torch.distributed.checkpoint, which reshards it."
            )
        return local.reshape(-1)

    def _like_parameter(self, flat: torch.Tensor) -> torch.Tensor:
        local = flat.view(local_tensor(self.parameter).shape)
        if not isinstance(self.parameter, DTensor):
            return local
        # `DTensor.from_local` would copy host memory to the device of the mesh.
        found = torch.empty_like(self.parameter.detach(), dtype=flat.dtype, device="cpu")
        local_tensor(found).set_(local)  # type: ignore[call-overload]
        return found
