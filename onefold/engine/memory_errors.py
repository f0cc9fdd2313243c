"""Add an account of the memory to out-of-memory errors in forward, backward and step."""

from __future__ import annotations

import os
from types import TracebackType

import torch

from onefold.engine.train_state import TrainState
from onefold.offload.host_memory import available_bytes
from onefold.plan import ModelBytes, Plan, Tier
from onefold.report.describe import held_bytes
from onefold.report.memory_usage import resident_bytes
from onefold.report.out_of_memory import MARK, DeviceAccount, RunFacts, advise, asked_bytes, explain, explain_host
from onefold.report.trace_window import TraceWindow


class MemoryErrors:
    """The out-of-memory errors of one engine."""

    def __init__(
        self, state: TrainState, plan: Plan, with_less: dict[str, Plan], trace: TraceWindow | None = None
    ) -> None:
        self._state, self._plan, self._with_less, self._trace = state, plan, with_less, trace

    def explained(self, phase: str) -> _Explained:
        """Return a context that adds an account of the memory to out-of-memory errors, and raises them again."""
        return _Explained(self, phase)

    def explain(self, error: BaseException, phase: str) -> None:
        """Add the account to the error's message. The state must be as it was when the error was raised."""
        unit = unit_in_use(error, self._state)
        where = f"rank {self._state.group.rank}, in the {phase}{f' of unit {unit}' if unit else ''}"
        if isinstance(error, torch.OutOfMemoryError) and self._state.device.type == "cuda":
            asked = asked_bytes(str(error))
            account = device_account(self._state)
            text = explain(where, str(self._state.device), account, advise(account, self._facts(asked)), asked)
            snapshot = self._trace.out_of_memory() if self._trace is not None else None
            if snapshot is not None:
                text += f"\nA memory snapshot is in {snapshot}. Open it at pytorch.org/memory_viz."
        else:
            held = held_bytes(self._state.schedule, self._state.step, Tier.HOST)
            text = explain_host(where, available_bytes(), resident_bytes(), held)
        error.args = (f"{error}\n{text}",)

    def _facts(self, asked: int | None) -> RunFacts:
        """Return the facts of the run that advice depends on. `asked`: bytes of the failed allocation."""
        state = self._state
        batch = state.window.batch
        options = f"{os.environ.get('PYTORCH_ALLOC_CONF', '')} {os.environ.get('PYTORCH_CUDA_ALLOC_CONF', '')}"
        return RunFacts(
            plan=self._plan,
            units=[[param.spec for param in unit.params] for unit in state.schedule.units],
            with_less=self._with_less,
            micro_batch=batch.micro,
            accumulation=batch.accumulation,
            asked=asked,
            has_expandable_segments="expandable_segments:True" in options,
        )


class _Explained:
    """The context of `MemoryErrors.explained`."""

    def __init__(self, errors: MemoryErrors, phase: str) -> None:
        self._errors, self._phase = errors, phase

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if error is None or not is_of_memory or MARK in str(error):
            return
        try:
            self._errors.explain(error, self._phase)
        except Exception as other:  # the out-of-memory error must be raised in any case
            error.add_note(f"The memory report of onefold failed: {type(other).__name__}: {other}")


def unit_in_use(error: BaseException, state: TrainState) -> str | None:
    """Return the name of the unit whose forward or backward ran when the error was raised."""
    names = {id(unit.module): unit.name for unit in state.schedule.units}
    found, trace = None, error.__traceback__
    while trace is not None:
        found = names.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    if found is None and state.schedule.context.in_backward:
        under_way = [unit for unit in state.schedule.units if unit.uses.backwards]
        inner = [unit for unit in under_way if not unit.encloses] or under_way
        found = inner[-1].name if inner else None
    return found


def device_account(state: TrainState) -> DeviceAccount:
    """Return the use of the device's memory, counted from tensors and reported by torch and the driver."""
    device, schedule = state.device, state.schedule
    free, total = torch.cuda.mem_get_info(device)
    held = held_bytes(schedule, state.step, Tier.DEVICE)
    params = [param for unit in schedule.units for param in unit.sharded_params]
    unsharded = sum(storage.size() for param in params for storage in param.unsharded_storages)
    slots = sum(param.grad.open_bytes for param in schedule.trained_params())
    matrices = state.step.matrices if state.step is not None else None
    states = held.states + (matrices.held_kept() if matrices is not None else 0)
    return DeviceAccount(
        total=total,
        limit=round(total * torch.cuda.memory.get_per_process_memory_fraction(device)),
        free=free,
        reserved=torch.cuda.memory_reserved(device),
        allocated=torch.cuda.memory_allocated(device),
        held=ModelBytes(held.parameters - unsharded, held.gradients - slots, held.masters, states, 0),
        unsharded=unsharded,
        slots=slots,
    )
