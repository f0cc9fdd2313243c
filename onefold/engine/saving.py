"""The engine saves: what a job's state is, and what of it this rank writes."""

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
from torch import nn

from onefold import __version__
from onefold.checkpoint.format.manifest import checksum, without_secrets
from onefold.checkpoint.format.plain_data import ClientStateError
from onefold.checkpoint.format.shard_files import Slot
from onefold.checkpoint.loading.load import buffer_name, capture_random_states
from onefold.checkpoint.loading.model_slots import groups_of, loose_states, outside_runs, own_slots
from onefold.checkpoint.saving import Retention, SaveError, SaveHeader, SaveOptions, SaveRequest
from onefold.checkpoint.saving.saver import LINGER, Saver
from onefold.comm import Board
from onefold.engine.facts import Facts
from onefold.report.log import logger
from onefold.runtime import Schedule


class Saving(Facts):
    """The part of the engine that saves."""

    global_steps: int
    global_samples: int
    skipped_steps: int
    lr_scheduler: Any
    training_dataloader: Any
    _schedule: Schedule

    def _start_saving(self) -> None:
        """Once the engine stands: let other ranks' saves be heard."""
        section = self.settings.checkpoint
        # Where this rank stood after which step, for a save that its program does not call.
        self._after_step = self.global_steps, self._own_state()
        agreement = self._schedule.order.agreement
        name = agreement.tell("the name of the engine", secrets.token_hex(8))
        self._saver = Saver(
            self,
            Board(self._group, name),
            agreement.guard,
            Retention(section.keep_last, section.keep_every),
            f"onefold {__version__}, torch {torch.__version__}",
        )
        if self.optimizer is not None:
            self.optimizer.let_change = self._saver.let_change
        leave = partial(_leave, weakref.ref(self), weakref.ref(self._saver))
        atexit.register(leave)
        # Called by `destroy`, or when the engine is deleted, whichever comes first; at exit `leave` does more.
        self._stop_saving = weakref.finalize(self, _stop, self._saver, leave)
        self._stop_saving.atexit = False

    def __del__(self) -> None:
        """Where a program is through with an engine, rank 0 may still be about to save a last time.

        By `del`, that is. The garbage collector calls finalizers first, so the saver has stopped then, and it is not
        kept waiting.
        """
        saver = self.__dict__.get("_saver")
        if saver is not None and not sys.is_finalizing() and not hasattr(sys, "last_value"):
            with suppress(RuntimeError):  # the store's host may be gone already
                saver.linger(self, seconds=LINGER)

    def _remember_step(self) -> None:
        """A step has been taken and counted."""
        if self._group.size > 1:
            self._after_step = self.global_steps, self._own_state()
        if self.optimizer is not None:
            self.optimizer.changing = False

    # -- saving -------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        background: bool | None = None,
    ) -> bool:
        """Write model, optimizer, scheduler, random numbers, data position and `client_state` under save_dir/tag.

        Call it on all ranks, or on rank 0 alone: then the others join at their next collective. `tag` is
        "global_step{N}" by default. `background` (default: the config's `checkpoint.async`): go on training once the
        state is copied to host memory; `wait_for_checkpoint`, the next save and the end of the process wait for it.
        """
        self._check_present()
        tag = str(tag) if tag is not None else f"global_step{self.global_steps}"
        options = SaveOptions(
            save_dir=str(save_dir),
            tag=tag,
            save_latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
            background=self.settings.checkpoint.async_save if background is None else background,
        )
        self._saver.save(
            options,
            lambda: self._header(client_state, exclude_frozen_parameters),
            lambda theirs: self._validate_tag(tag, theirs),
        )
        return True

    def wait_for_checkpoint(self) -> None:
        """Until the save in the background is on disk; raises if it failed."""
        self._saver.finish()

    def _raise_failed_save(self) -> None:
        """Some rank knows of a save in the background that failed: all of them say so, before the step."""
        self._saver.finish()
        raise SaveError("the last save in the background failed on another rank: see its error")

    def _validate_tag(self, mine: str, theirs: str) -> None:
        if mine == theirs or self.settings.checkpoint.tag_validation == "Ignore":
            return
        message = f"rank {self._group.rank} saves under the tag {mine!r}, rank 0 under {theirs!r}"
        if self.settings.checkpoint.tag_validation == "Fail":
            raise SaveError(f"{message}; checkpoint.tag_validation is Fail")
        logger.warning("%s: rank 0's is taken", message)

    def _header(self, client_state: Mapping[str, Any] | None, exclude_frozen: bool) -> SaveHeader:
        if client_state is not None and not isinstance(client_state, Mapping):
            raise ClientStateError(
                f"client_state must be a dict, or None, not a {type(client_state).__name__}: put it into one"
            )
        if self._window.is_open:
            raise SaveError(
                "gradients have been accumulated that no step has used yet, and a checkpoint does not hold them: save "
                "right after the engine.step() of a boundary (engine.is_gradient_accumulation_boundary() before it), "
                "or call engine.zero_grad() to drop them"
            )
        outside, aliases = outside_runs(self._model)
        # What is a parameter and lies in no run (quantized weights, whole numbers) is not trained here.
        parameters = groups_of(self._units) | {n: None for n, t in outside.items() if isinstance(t, nn.Parameter)}
        return SaveHeader(
            state={
                **self._job_state(),
                "client_state": dict(client_state or {}),
                "config": without_secrets(self.settings.raw),
            },
            parameters=parameters,
            aliases=aliases,
            left_out=[name for name, group in parameters.items() if group is None] if exclude_frozen else [],
            buffers={name: _digest(t) for name, t in outside.items() if not isinstance(t, nn.Parameter)},
        )

    @property
    def _model(self) -> nn.Module:
        """The model as it is, whatever is in flight: any thread may ask."""
        model = self._modules["module"]
        assert model is not None
        return model

    def _job_state(self) -> dict[str, Any]:
        optimizer, scheduler = self.optimizer, self.lr_scheduler
        groups = optimizer.param_groups if optimizer is not None else []
        attributes = self._optimizer_attributes()
        return {
            "optimizer": {
                "name": optimizer.name,
                "num_steps": optimizer.num_steps,
                "groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
                **({"attributes": attributes} if attributes else {}),
            }
            if optimizer is not None
            else None,
            "lr_scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
            "loss_scale": self._update.loss_scale.state_dict(),
            "counters": {
                "global_steps": self.global_steps,
                "global_samples": self.global_samples,
                "skipped_steps": self.skipped_steps,
                "micro_steps": self._window.micro_steps,
            },
        }

    def _optimizer_attributes(self) -> dict[str, Any]:
        found, unsaved = self.optimizer.own_attributes() if self.optimizer is not None else ({}, [])
        for name in unsaved:
            logger.warning(
                "the optimizer's step writes its attribute %r, and a checkpoint holds numbers, text and containers of "
                "them: a resumed run starts from what the optimizer is built with",
                name,
            )
        return found

    def _own_state(self) -> dict[str, Any]:
        loader = self.training_dataloader
        position = loader.state_dict() if hasattr(loader, "state_dict") else None
        return {"rng": capture_random_states(self.device), "data": position}

    def steps_done(self) -> int | None:
        changing = self.optimizer is not None and self.optimizer.changing
        remembered = self._group.size == 1 or self._after_step[0] == self.global_steps
        return self.global_steps if remembered and not changing else None

    def part_of(self, request: SaveRequest, *, joined: bool) -> tuple[list[Slot], dict[str, Any]]:
        self._check_present()
        if self.optimizer is not None:
            self.optimizer.wait_for_host()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        rank = self._group.rank
        first = rank < self._group.num_shards  # others hold the same again
        slots = list(own_slots(self._units, self.optimizer, exclude_frozen=request.exclude_frozen)) if first else []
        for name, tensor in outside_runs(self._model, exclude_frozen=request.exclude_frozen)[0].items():
            if rank == 0:
                slots.append(Slot.whole(f"model/{name}", tensor))
            elif not joined and not isinstance(tensor, nn.Parameter) and request.buffers.get(name) != _digest(tensor):
                slots.append(Slot.whole(buffer_name(rank, name), tensor))
        own = self._after_step[1] if joined else self._own_state()
        # Where every rank steps everything, one of them says it all.
        loose = loose_states(self._units, self.optimizer) if rank == 0 or (self.plan.shards_states and first) else {}
        return slots, {**own, "loose": loose}


def _leave(engine: Callable[[], Saving | None], of: Callable[[], Saver | None]) -> None:
    """The process ends. Unless an error ends it, rank 0 may still be about to save. No thread may stay in the store."""
    owner, saver = engine(), of()
    if saver is not None:
        with suppress(RuntimeError):
            if owner is not None and not hasattr(sys, "last_value"):
                saver.linger(owner, seconds=None)
        saver.stop()


def _stop(saver: Saver, leave: Callable[[], None]) -> None:
    """The engine goes before the process does."""
    atexit.unregister(leave)
    saver.stop()


def _digest(tensor: torch.Tensor) -> int:
    return checksum(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
