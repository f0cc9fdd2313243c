"""The engine saves: what a job's state is, and what of it this rank writes."""

from __future__ import annotations

import atexit
import secrets
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from onefold.checkpoint.format.folder import put_pointer_files, retain
from onefold.checkpoint.format.manifest import checksum, without_secrets
from onefold.checkpoint.format.plain_data import ClientStateError
from onefold.checkpoint.format.shard_files import Slot
from onefold.checkpoint.loading.load import buffer_name
from onefold.checkpoint.loading.random_states import capture_random_states
from onefold.checkpoint.loading.slots import groups_of, loose_states, outside_units, own_slots
from onefold.checkpoint.saving.rank_writer import SaveError, SaveHeader, SaveOptions, SaveRequest
from onefold.checkpoint.saving.saver import Saver
from onefold.comm import Board
from onefold.engine.train_state import TrainState
from onefold.log import logger
from onefold.version import __version__


class Saving:
    """Saves the train state: what the program calls, and this rank's part of saves that it does not call."""

    def __init__(self, state: TrainState) -> None:
        self._state = state
        section = state.plan.loop.checkpoint
        # Where this rank stood after which step, for a save that its program does not call.
        self._after_step = state.global_steps, self._own_state()
        agreement = state.schedule.order.agreement
        name = agreement.tell("the name of the engine", secrets.token_hex(8))
        self.pointer_files: list[str] = []
        """Names of files that other tools look for in a checkpoint; each is written and points to the manifest."""
        self.refuses_open_window = True
        """Whether a save inside an accumulation window raises, or is warned of."""
        self.saver = Saver(
            self,
            Board(state.group, name),
            agreement.guard,
            partial(_published, self.pointer_files, keep_last=section.keep_last, keep_every=section.keep_every),
            f"onefold {__version__}, torch {torch.__version__}",
        )
        if state.step is not None:
            state.step.wait_until_states_copied = self.saver.wait_until_states_copied
        self._leave: Callable[[], None] | None = partial(_leave, weakref.ref(self))
        atexit.register(self._leave)

    def linger(self, seconds: float | None) -> None:
        """The program is through with the engine, here: rank 0 may still be about to save a last time."""
        with suppress(RuntimeError):  # the store's host may be gone already
            self.saver.linger(self, seconds=seconds)

    def stop(self) -> None:
        """The engine goes."""
        if self._leave is not None:
            atexit.unregister(self._leave)
        self._leave = None
        self.saver.stop()

    def remember_step(self) -> None:
        """A step has been taken and counted."""
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
        state = self._state
        state.check_complete()
        state.schedule.forget_cached()
        tag = str(tag) if tag is not None else f"global_step{state.global_steps}"
        background = state.plan.loop.checkpoint.async_save if background is None else background
        options = SaveOptions(str(save_dir), tag, save_latest, exclude_frozen, background)
        self.saver.save(
            options, lambda: self._header(client_state, exclude_frozen), lambda theirs: self._validate_tag(tag, theirs)
        )

    def raise_failed(self) -> None:
        """Some rank knows of a save in the background that failed: all of them say so, before the step."""
        self.saver.finish()
        raise SaveError("the last save in the background failed on another rank: see its error")

    def _validate_tag(self, mine: str, theirs: str) -> None:
        validation = self._state.plan.loop.checkpoint.tag_validation
        if mine == theirs or validation == "Ignore":
            return
        message = f"rank {self._state.group.rank} saves under the tag {mine!r}, rank 0 under {theirs!r}"
        if validation == "Fail":
            raise SaveError(f"{message}; checkpoint.tag_validation is Fail")
        logger.warning("%s: rank 0's is taken", message)

    def _header(self, client_state: Mapping[str, Any] | None, exclude_frozen: bool) -> SaveHeader:
        if client_state is not None and not isinstance(client_state, Mapping):
            raise ClientStateError(
                f"client_state must be a dict, or None, not a {type(client_state).__name__}: put it into one"
            )
        if self._state.window.is_open:
            problem = "gradients have been accumulated that no step has used yet, and a checkpoint does not hold them"
            if self.refuses_open_window:
                raise SaveError(
                    f"{problem}: save right after the engine.step() of a boundary "
                    "(engine.is_gradient_accumulation_boundary() before it), or call engine.zero_grad() to drop them"
                )
            logger.warning("%s: a run that is resumed from it goes on without them", problem)
        outside, aliases = outside_units(self._state.model)
        buffers = {name for name, _ in self._state.model.named_buffers()}
        # What lies in no unit and is no buffer is not trained here: parameters left alone, scales of packed ones.
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
        state = self._state
        step, scheduler, optimizer = state.step, state.lr_scheduler, None
        if step is not None:
            attributes, unsaved = step.attributes.values()
            for name in unsaved:
                logger.warning(
                    "the optimizer's step writes its attribute %r, and a checkpoint holds numbers, text and containers "
                    "of them: a resumed run starts from what the optimizer is built with",
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
            "counters": {
                "global_steps": state.global_steps,
                "global_samples": state.global_samples,
                "skipped_steps": state.skipped_steps,
                "micro_steps": state.window.micro_steps,
            },
        }

    def _own_state(self) -> dict[str, Any]:
        loader = self._state.training_dataloader
        position = loader.state_dict() if hasattr(loader, "state_dict") else None
        return {"rng": capture_random_states(self._state.device), "data": position}

    def steps_done(self) -> int | None:
        """The step after which this rank stands; None inside a step."""
        state = self._state
        changing = state.step is not None and state.step.changing
        remembered = state.group.size == 1 or self._after_step[0] == state.global_steps
        return state.global_steps if remembered and not changing else None

    def _synchronize(self) -> None:
        if self._state.device.type == "cuda":
            torch.cuda.synchronize(self._state.device)

    def part_of(self, request: SaveRequest, *, joined: bool) -> tuple[list[Slot], dict[str, Any]]:
        """What this rank writes of a save, and its own state. `joined`: its program has not called for it."""
        state = self._state
        state.check_complete()
        # The program may compute on another stream than this thread's, before the slots are made and after.
        self._synchronize()
        rank, units = state.group.rank, state.schedule.units
        first = rank < state.group.num_shards  # others hold the same again
        slots = list(own_slots(units, state.step, exclude_frozen=request.exclude_frozen)) if first else []
        self._synchronize()
        buffers = {name for name, _ in state.model.named_buffers()}
        for name, tensor in outside_units(state.model, exclude_frozen=request.exclude_frozen)[0].items():
            if rank == 0:
                slots.append(Slot.whole(f"model/{name}", tensor))
            elif not joined and name in buffers and request.buffers.get(name) != _digest(tensor):
                slots.append(Slot.whole(buffer_name(rank, name), tensor))
        own = self._after_step[1] if joined else self._own_state()
        # Where every rank steps everything, one of them says it all.
        tells = rank == 0 or (state.plan.shards_states and first)
        return slots, {**own, "loose": loose_states(units, state.step) if tells else {}}


def _published(pointer_files: list[str], tag_folder: Path, *, keep_last: int | None, keep_every: int | None) -> None:
    put_pointer_files(tag_folder, pointer_files)
    retain(tag_folder.parent, keep_last=keep_last, keep_every=keep_every)


def _leave(saving: weakref.ref[Saving]) -> None:
    """The process ends. Unless an error ends it, rank 0 may still be about to save. No thread may stay in the store."""
    found = saving()
    if found is not None:
        if not hasattr(sys, "last_value"):
            found.linger(None)
        found.stop()


def _digest(tensor: torch.Tensor) -> int:
    return checksum(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
