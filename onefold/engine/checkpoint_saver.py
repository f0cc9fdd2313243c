"""Save a checkpoint: collect the state of the job, and the part of it that this rank writes."""

from __future__ import annotations

import atexit
import secrets
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from onefold.checkpoint.format.folder import put_pointer_files, retain
from onefold.checkpoint.format.manifest import checksum, without_secrets
from onefold.checkpoint.format.plain_data import ClientStateError
from onefold.checkpoint.format.shard_files import Slot
from onefold.checkpoint.saving.rank_shard_writer import SaveError, SaveHeader, SaveOptions, SaveRequest
from onefold.checkpoint.saving.save_coordinator import SaveCoordinator
from onefold.checkpoint.state.random_states import capture_random_states
from onefold.checkpoint.state.slots import buffer_name, groups_of, loose_states, outside_units, own_slots
from onefold.checkpoint.state.weights import consolidate, save_weights
from onefold.comm import Board
from onefold.engine.train_state import TrainState
from onefold.log import logger
from onefold.storage.place import Place, absolute, place
from onefold.version import __version__


class CheckpointSaver:
    """Saves the train state of one engine, also when rank 0 saves and the program of this rank does not."""

    def __init__(self, state: TrainState) -> None:
        self._state = state
        section = state.plan.loop.checkpoint
        # The last step and the state of this rank after it, for saves that its program does not call.
        self._after_step = state.global_steps, self._own_state()
        name = state.schedule.agreement.broadcast_text("the name of the engine", secrets.token_hex(8))
        self.pointer_files: list[str] = []
        """Names of files that other tools look for in a checkpoint. Each refers to the manifest."""
        self.last: Place | None = None
        """The folder of the last checkpoint that the program has saved, or loaded as a whole, on this rank."""
        self.refuses_open_window = True
        """Whether a save inside an accumulation window raises. Otherwise it warns."""
        self.coordinator = SaveCoordinator(
            self,
            Board(state.group, name),
            state.schedule.guard,
            partial(_finish_folder, self.pointer_files, keep_last=section.keep_last, keep_every=section.keep_every),
            f"onefold {__version__}, torch {torch.__version__}",
        )
        if state.step is not None:
            state.step.wait_until_states_copied = self.coordinator.wait_until_states_copied
        self._at_exit: Callable[[], None] | None = partial(_stop_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    def linger(self, seconds: float | None) -> None:
        """Join a last save of rank 0, for up to `seconds`, after the program has dropped the engine on this rank."""
        with suppress(RuntimeError):  # the process that hosts the store may have ended
            self.coordinator.linger(self, seconds=seconds)

    def stop(self) -> None:
        """Stop listening for save requests of rank 0."""
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        self._at_exit = None
        self.coordinator.stop()

    def remember_step(self) -> None:
        """Record the state of this rank after a step that was taken and counted."""
        if self._state.group.size > 1:
            self._after_step = self._state.global_steps, self._own_state()
        if self._state.step is not None:
            self._state.step.finish()

    def save(
        self,
        save_dir: str,
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        save_latest: bool,
        exclude_frozen: bool,
        background: bool | None,
    ) -> None:
        """Save a checkpoint. See `Engine.save_checkpoint`."""
        state = self._state
        state.check_complete()
        state.schedule.context.forget_cached()
        tag = str(tag) if tag is not None else f"global_step{state.global_steps}"
        section = state.plan.loop.checkpoint
        background = section.async_save if background is None else background
        options = SaveOptions(str(save_dir), tag, save_latest, exclude_frozen, background, section.private)
        self.coordinator.save(
            options, lambda: self._header(client_state, exclude_frozen), lambda theirs: self._validate_tag(tag, theirs)
        )
        self.last = absolute(place(save_dir) / tag)

    def copy(
        self, folder: str, name: str, kept: list[str], client_state: Callable[[], Mapping[str, Any]], *, may_begin: bool
    ) -> str:
        """Write a peer copy in the background. Return its name, or ""; see `SaveCoordinator.copy`.

        `client_state` is called on rank 0, if the copy begins.
        """
        self._state.check_complete()
        self._state.schedule.context.forget_cached()
        options = SaveOptions(folder, name, False, False, background=True, private=True, kept_copies=kept)
        return self.coordinator.copy(options, lambda: self._header(client_state(), False), may_begin=may_begin)

    def whole_state_dict(self, exclude_frozen: bool) -> dict[str, torch.Tensor]:
        """Return the unsharded state dict of the model. See `Engine.module_state_dict`."""
        state = self._state
        state.flush()
        state.schedule.wait_for_step()
        if state.schedule.sharded_units:
            return consolidate(state.model, exclude_frozen=exclude_frozen) or {}
        found = state.model.state_dict()
        parameters = state.model.named_parameters(remove_duplicate=False)
        frozen = {name for name, p in parameters if not p.requires_grad} if exclude_frozen else set()
        return {name: tensor for name, tensor in found.items() if name not in frozen}

    def save_weights(self, folder: str, file_name: str, exclude_frozen: bool, max_shard_size: int | str) -> None:
        """Write the unsharded model weights. See `Engine.save_16bit_model`."""
        state = self._state
        state.check_present()
        state.flush()
        state.schedule.wait_for_step()
        save_weights(
            state.model, folder, file_name=file_name, max_shard_size=max_shard_size, exclude_frozen=exclude_frozen
        )

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed on this rank."""
        return self.coordinator.failed

    def finish(self) -> None:
        """Wait for the save in the background. Raise its error if it failed."""
        self.coordinator.finish()

    def wait_until_copied(self) -> None:
        """Wait until a save in the background has copied the states that the next step changes."""
        self.coordinator.wait_until_states_copied()

    def raise_failed(self) -> None:
        """Raise the error of a background save that failed on any rank. All ranks call this before they step."""
        self.finish()
        raise SaveError("the last background save failed on another rank. See the error of that rank.")

    def _validate_tag(self, mine: str, theirs: str) -> None:
        """Raise or warn if the tag of this rank is not that of rank 0, as `checkpoint.tag_validation` says."""
        validation = self._state.plan.loop.checkpoint.tag_validation
        if mine == theirs or validation == "Ignore":
            return
        message = f"rank {self._state.group.rank} saves under the tag {mine!r}, rank 0 under {theirs!r}"
        if validation == "Fail":
            raise SaveError(f"{message}. Use one tag on all ranks (checkpoint.tag_validation is Fail).")
        logger.warning("%s. The tag of rank 0 is used", message)

    def _header(self, client_state: Mapping[str, Any] | None, exclude_frozen: bool) -> SaveHeader:
        """Return the part of a checkpoint that rank 0 writes for all ranks."""
        if client_state is not None and not isinstance(client_state, Mapping):
            raise ClientStateError(
                f"client_state must be a dict or None, not a {type(client_state).__name__}. Put it into a dict."
            )
        if self._state.window.is_open:
            problem = "gradients are accumulated that no step has used yet, but checkpoints do not contain gradients"
            if self.refuses_open_window:
                raise SaveError(
                    f"{problem}. Save after the engine.step() of an accumulation boundary "
                    "(engine.is_gradient_accumulation_boundary() before it), or call engine.zero_grad() to drop them."
                )
            logger.warning("%s. A resumed run continues without them", problem)
        outside, aliases = outside_units(self._state.model)
        buffers = {name for name, _ in self._state.model.named_buffers()}
        # Tensors that are in no unit and no buffers are not trained: other parameters, and scales of quantized ones.
        parameters = groups_of(self._state.schedule.units) | {name: None for name in outside if name not in buffers}
        return SaveHeader(
            state={
                **self._job_state(),
                "client_state": dict(client_state or {}),
                "config": without_secrets(self._state.config),
            },
            parameters=parameters,
            aliases=aliases,
            left_out=[name for name, group in parameters.items() if group is None] if exclude_frozen else [],
            buffers={name: _digest(tensor) for name, tensor in outside.items() if name in buffers},
        )

    def _job_state(self) -> dict[str, Any]:
        """Return the state that is the same on all ranks: optimizer groups, schedule, loss scale and counters."""
        state = self._state
        step, scheduler, optimizer = state.step, state.lr_scheduler, None
        if step is not None:
            attributes, unsaved = step.attributes.values()
            for name in unsaved:
                logger.warning(
                    "the optimizer's step writes its attribute %r, which is not saved, because it is not a number, "
                    "text or a container of them. A resumed run starts with its initial value",
                    name,
                )
            optimizer = {
                "name": step.name,
                "num_steps": step.num_steps,
                "groups": [{key: value for key, value in group.items() if key != "params"} for group in step.groups],
                **({"attributes": attributes} if attributes else {}),
            }
        return {
            "optimizer": optimizer,
            "lr_scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
            "loss_scale": state.decision.loss_scale.state_dict(),
            **{name: spikes.state_dict() for name, spikes in state.decision.spike_guards.items()},
            "counters": {
                "global_steps": state.global_steps,
                "global_samples": state.global_samples,
                "skipped_steps": state.skipped_steps,
                "micro_steps": state.window.micro_steps,
            },
        }

    def _own_state(self) -> dict[str, Any]:
        """Return the state of this rank alone: random states and the position in the data."""
        loader = self._state.training_dataloader
        position = loader.state_dict() if hasattr(loader, "state_dict") else None
        return {"rng": capture_random_states(self._state.device), "data": position}

    def steps_done(self) -> int | None:
        """Return the number of steps that this rank has completed; None inside a step."""
        state = self._state
        changing = state.step is not None and state.step.changing
        remembered = state.group.size == 1 or self._after_step[0] == state.global_steps
        return state.global_steps if remembered and not changing else None

    def _synchronize(self) -> None:
        """Wait for all work of the device."""
        if self._state.device.type == "cuda":
            torch.cuda.synchronize(self._state.device)

    def part_of(self, request: SaveRequest, *, joined: bool) -> tuple[list[Slot], dict[str, Any]]:
        """Return the tensors that this rank writes, and its state. `joined`: its program has not called the save."""
        state = self._state
        state.check_complete()
        # The program may compute on other streams than this thread, before the slots are made and while they are.
        self._synchronize()
        rank, units = state.group.rank, state.schedule.units
        first = rank < state.group.num_shards  # the other ranks hold replicas
        slots = list(own_slots(units, state.step, exclude_frozen=request.exclude_frozen)) if first else []
        self._synchronize()
        buffers = {name for name, _ in state.model.named_buffers()}
        for name, tensor in outside_units(state.model, exclude_frozen=request.exclude_frozen)[0].items():
            if rank == 0:
                slots.append(Slot.whole(f"model/{name}", tensor))
            elif not joined and name in buffers and request.buffers.get(name) != _digest(tensor):
                slots.append(Slot.whole(buffer_name(rank, name), tensor))
        own = self._after_step[1] if joined else self._own_state()
        # If states are replicated, rank 0 writes those that have no shape of a parameter.
        writes_loose = rank == 0 or (state.plan.shards_states and first)
        return slots, {**own, "loose": loose_states(units, state.step) if writes_loose else {}}


def _finish_folder(
    pointer_files: list[str], tag_folder: Place, *, keep_last: int | None, keep_every: int | None
) -> None:
    """Write the pointer files of a published checkpoint, and remove old checkpoints."""
    put_pointer_files(tag_folder, pointer_files)
    retain(tag_folder.parent, keep_last=keep_last, keep_every=keep_every)


def _stop_at_exit(reference: weakref.ref[CheckpointSaver]) -> None:
    """Join a last save of rank 0 when the process ends without an error, and stop the listening thread."""
    found = reference()
    if found is not None:
        if not hasattr(sys, "last_value"):
            found.linger(None)
        found.stop()


def _digest(tensor: torch.Tensor) -> int:
    """Return the checksum of the bytes of a tensor."""
    return checksum(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
