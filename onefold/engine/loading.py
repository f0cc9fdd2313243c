"""The engine loads: any plan's checkpoint, on any number of ranks, agreed on by all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from onefold.checkpoint.format import folder
from onefold.checkpoint.format.files import CheckpointError
from onefold.checkpoint.format.manifest import NAME
from onefold.checkpoint.format.shard_files import CheckpointReader, Slot
from onefold.checkpoint.loading.load import (
    LoadTarget,
    MisfitError,
    check_groups,
    check_loose_like,
    check_schedule,
    check_taken,
    fill,
    groups_for,
    state_reads,
    verify,
    weight_reads,
)
from onefold.checkpoint.loading.random_states import check_random_states, restore_random_states
from onefold.checkpoint.loading.slots import loose_states
from onefold.comm import agree_in_meeting
from onefold.engine.saving import Saving
from onefold.engine.train_state import TrainState
from onefold.log import logger
from onefold.runtime import unsharded


@dataclass(frozen=True)
class Asked:
    """What of a checkpoint is wanted."""

    strict: bool
    optimizer: bool
    scheduler: bool
    job: bool
    exactly: bool
    """Random numbers and data position too."""
    custom: Callable[..., None] | None


@dataclass(frozen=True)
class Opened:
    """A checkpoint, and what this rank has read of it or is about to."""

    checkpoint: CheckpointReader
    state: dict[str, Any]
    own: dict[str, Any]
    same_world: bool
    whole: dict[str, torch.Tensor]
    groups: list[dict[str, Any]]
    """Hyperparameters for each group of the optimizer."""
    reads: list[Slot]


class Loading:
    """Loads a checkpoint into the train state, with all ranks together."""

    def __init__(self, state: TrainState, saving: Saving) -> None:
        self._state = state
        self._saving = saving

    def load(
        self,
        load_dir: str,
        tag: str | None,
        *,
        strict: bool,
        optimizer_states: bool,
        lr_scheduler_states: bool,
        module_only: bool,
        custom: Callable[..., None] | None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """The checkpoint's path and client state; None and None where there is none. See `Engine.load_checkpoint`."""
        state = self._state
        state.schedule.check_awake()
        state.flush()
        self._saving.saver.finish()
        state.schedule.meet_for_load()
        if state.step is not None:
            state.step.about_to_write()
        state.drop_gradients()
        state.window.restart()
        asked = Asked(
            strict=strict,
            optimizer=optimizer_states and not module_only and state.step is not None,
            scheduler=lr_scheduler_states and not module_only and state.lr_scheduler is not None,
            job=not module_only,
            exactly=not module_only and (optimizer_states or state.step is None),
            custom=custom,
        )
        # Each rank reads its own slices. Folders may differ: they are as a rank's node has them mounted.
        given = {
            "tag": str(tag),
            "load_module_strict": str(strict),
            "load_optimizer_states": str(optimizer_states),
            "load_lr_scheduler_states": str(lr_scheduler_states),
            "load_module_only": str(module_only),
            "custom_load_fn": "a function" if custom is not None else "None",
        }
        advice = "Every rank must load the same"
        agree_in_meeting(state.schedule.order.agreement, "load_checkpoint", [("the call", given)], advice)
        names, tried = self._candidates(Path(load_dir), tag), list[str]()
        while names:
            with ExitStack() as stack:
                problem, found = self._read(Path(load_dir, names[0]), asked, stack)
                if found is not None:
                    return str(found.checkpoint.folder), self._take_up(found, asked)
            tried.append(names.pop(0))
            if not names and tag is None:  # a job that goes on beside may have saved others, and removed these
                names = self._candidates(Path(load_dir), tag, tried)
            if not names:
                other = "" if tag is not None else f". {load_dir} has no other complete checkpoint to take instead"
                raise CheckpointError(f"{problem}{other}")
            self._warn(f"{problem}: taking checkpoint {names[0]} instead")
        return None, None

    def _warn(self, message: str) -> None:
        if self._state.group.rank == 0:
            logger.warning("%s", message)

    def _candidates(self, load_dir: Path, tag: str | None, tried: Sequence[str] = ()) -> list[str]:
        """The tags to try, best first, as rank 0 sees them. None where there is nothing to load."""
        text = error = ""
        if self._state.group.rank == 0:
            try:
                text = "\n".join(_find_candidates(load_dir, tag, tried))
            except (ValueError, OSError) as found:
                error = str(found)
        told = self._state.schedule.order.agreement.tell("load_checkpoint", f"{error}\0{text}")
        error, _, text = told.partition("\0")
        if error:
            raise CheckpointError(error)
        return text.split("\n") if text else []

    def _read(self, path: Path, asked: Asked, stack: ExitStack) -> tuple[str, Opened | None]:
        """Read what this rank needs. Where any rank meets damage: what it is, and nothing else."""
        opened: list[Opened] = []

        def prepare() -> None:
            checkpoint = stack.enter_context(CheckpointReader.open(path))
            checkpoint.check_headers()
            state = checkpoint.state
            same_world = checkpoint.manifest.world_size == self._state.group.size
            own = checkpoint.own(self._state.group.rank if same_world else 0) if asked.exactly else {}
            reads = [] if asked.custom else weight_reads(checkpoint, self._target, strict=asked.strict)
            whole: dict[str, torch.Tensor] = {}
            if asked.custom:
                whole = {name: checkpoint.tensor(f"model/{name}") for name in checkpoint.names("model/")}
                whole |= {a: whole[name] for a, name in checkpoint.manifest.aliases.items() if name in whole}
            groups: list[dict[str, Any]] = []
            if asked.optimizer:
                reads += self._state_reads(checkpoint, state["optimizer"], asked)
                groups = groups_for(checkpoint, self._target, state["optimizer"]["groups"])
            found = Opened(checkpoint, state, own, same_world, whole, groups, reads)
            self._check_small(found, asked)
            if self._state.global_steps:  # there is something to lose
                verify(checkpoint, reads)
            opened.append(found)

        step = self._state.step
        undo = step.remember_states() if step is not None else lambda: None
        try:
            problem = self._agree(prepare)
        except Exception:
            undo()
            raise
        if problem:
            undo()
            return problem, None
        # From here on values are written. `_take_up` ends this; an error before it leaves it as it is, on all ranks.
        self._state.half_loaded = f"load_checkpoint of {path} failed half-way on some rank"
        problem = self._agree(lambda: self._fill(opened[0]))
        if problem:
            self._state.half_loaded = f"load_checkpoint of {path} failed half-way: {problem}"
        return problem, None if problem else opened[0]

    def _fill(self, opened: Opened) -> None:
        rounded = sorted(fill(opened.checkpoint, opened.reads))
        if rounded and self._state.group.rank == 0:
            logger.warning(
                "%s: masters are held as %s and optimizer states as %s here, and not all values fit: %d of this rank's "
                "tensors were rounded, %s first. A run that goes on from here differs from one in the forms that were "
                "saved", opened.checkpoint.folder, self._state.plan.formats.masters, self._state.plan.formats.states,
                len(rounded), rounded[0],
            )  # fmt: skip

    def _check_small(self, found: Opened, asked: Asked) -> None:
        """Everything but tensors is tried before a tensor is written: what takes it must not fail then."""
        path, state = found.checkpoint.folder / NAME, found.state
        try:
            if asked.optimizer:
                assert self._state.step is not None
                check_groups(found.groups, self._state.step.groups)
            if self._restores_schedule(found, asked):
                scheduler, step = self._state.lr_scheduler, self._state.step
                check_schedule(state["lr_scheduler"], scheduler)
                groups = step.groups if step is not None else []
                check_taken(state["lr_scheduler"], scheduler, groups, "state.lr_scheduler")
            if self._restores_data(found, asked):
                loader = self._state.training_dataloader
                if hasattr(loader, "check_state"):
                    loader.check_state(found.own["data"])
                else:
                    check_taken(found.own["data"], loader, [], "data")
            if asked.exactly and found.same_world and found.own:
                check_random_states(found.own["rng"], self._state.device)
        except MisfitError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def _restores_schedule(self, found: Opened, asked: Asked) -> bool:
        has_state = asked.scheduler and found.state["lr_scheduler"] is not None
        return has_state and hasattr(self._state.lr_scheduler, "load_state_dict")

    def _restores_data(self, found: Opened, asked: Asked) -> bool:
        has_position = asked.exactly and found.own.get("data") is not None
        return has_position and hasattr(self._state.training_dataloader, "load_state_dict")

    @property
    def _target(self) -> LoadTarget:
        state = self._state
        return LoadTarget(state.model, state.schedule.units, state.step, state.group.rank, state.group.size)

    def _agree(self, work: Callable[[], None]) -> str:
        """Do this rank's work. Damage that any rank finds is returned on all, what else goes wrong is raised on all."""
        kind, caught = 0, None
        try:
            work()
        except Exception as error:
            caught = error
            kind = 1 if isinstance(error, CheckpointError | OSError) else 2 if isinstance(error, MisfitError) else 3
        kinds = self._state.schedule.meet_for_load(kind)
        if not any(kinds):
            return ""
        worst = kinds.index(max(kinds))
        message = self._state.schedule.order.agreement.tell("load_checkpoint", str(caught or ""), worst)
        if kind == 3:
            assert caught is not None
            raise caught
        if max(kinds) == 3:
            raise RuntimeError(f"load_checkpoint failed on rank {worst}: {message}")
        if max(kinds) == 2:
            raise MisfitError(message)
        return message

    def _state_reads(self, checkpoint: CheckpointReader, saved: dict[str, Any] | None, asked: Asked) -> list[Slot]:
        if saved is None:
            raise MisfitError(f"{checkpoint.folder} was saved without an optimizer: load_optimizer_states=False")
        step = self._state.step
        assert step is not None
        if saved["name"] is not None and _kind(saved["name"]) != _kind(step.name):
            raise MisfitError(
                f"{checkpoint.folder} has the states of {saved['name']}, not of {step.name}: "
                "load_optimizer_states=False leaves the optimizer as it is"
            )
        loose: dict[str, Any] = {}
        for rank in range(checkpoint.manifest.world_size):
            for name, values in checkpoint.loose(rank).items():
                loose.setdefault(name, {}).update(values)
        misfits = step.misfits(loose)
        if misfits and asked.strict:
            raise MisfitError(
                f"{checkpoint.folder} was saved with parameters divided into other matrices:\n  "
                + "\n  ".join(misfits.values())
                + "\nSet split_rows as it was. load_module_strict=False starts what is kept of these anew, and "
                "load_optimizer_states=False all optimizer states"
            )
        for name, words in misfits.items():
            self._warn(f"{checkpoint.folder}: {words}. It starts anew")
            del loose[name]
        try:
            if saved["num_steps"]:  # before the first step there are none
                check_loose_like(loose, loose_states(self._state.schedule.units, step))
        except ValueError as error:
            raise CheckpointError(f"{checkpoint.folder / NAME}: {error}") from error
        return state_reads(checkpoint, self._target, loose, strict=asked.strict and saved["num_steps"] > 0)

    def _take_up(self, found: Opened, asked: Asked) -> dict[str, Any]:
        """Everything that was read is in place: tell the rest of the engine, and go on from there."""
        state, step = found.state, self._state.step
        if asked.custom is not None:
            # The user's own function moves an unsharded state dict into the unsharded model.
            with unsharded(self._state.model.parameters()) as handles:
                asked.custom(src=found.whole, dst=self._state.model)
                for handle in handles:
                    handle.take_values_of(0)
        else:
            # Masters have their values: parameters take them over, and ranks send each other their slices.
            with torch.no_grad():
                for store in step.stores if step is not None else ():
                    store.sync_model_weight_from_master().synchronize()
                self._state.schedule.refresh_now()
        if asked.optimizer:
            assert step is not None
            step.resume(state["optimizer"]["num_steps"])
            if not step.take_groups(found.groups):
                self._warn(
                    f"{found.checkpoint.folder}: its optimizer keeps other states than {step.name} here: the "
                    "learning rate and all else that a group has stay as this job's config says"
                )
            step.attributes.take(state["optimizer"].get("attributes", {}))
            # A scale that is found while training goes on from where it was; one that the config fixes stays.
            scale, saved = self._state.decision.loss_scale, state["loss_scale"] or {}
            if "iteration" in saved and "iteration" in scale.state_dict():
                scale.load_state_dict(saved)
        if self._restores_schedule(found, asked):
            self._state.lr_scheduler.load_state_dict(state["lr_scheduler"])
        elif asked.scheduler and state["lr_scheduler"] is None:
            self._warn(f"{found.checkpoint.folder} holds no state of a schedule: the learning rate's starts anew")
        if asked.job:
            self._restore_job(found, asked)
        self._saving.remember_step()
        self._state.half_loaded = ""
        client_state: dict[str, Any] = state["client_state"]
        return client_state

    def _restore_job(self, found: Opened, asked: Asked) -> None:
        state, counters = self._state, found.state["counters"]
        state.global_steps = counters["global_steps"]
        state.global_samples = counters["global_samples"]
        state.skipped_steps = counters["skipped_steps"]
        state.window.resume(counters["micro_steps"])
        state.decision.forget_norm()
        if not asked.exactly:
            return
        if self._restores_data(found, asked):
            state.training_dataloader.load_state_dict(found.own["data"])
        if not found.same_world:
            self._warn(
                f"{found.checkpoint.folder} was saved by {found.checkpoint.manifest.world_size} ranks, this job has "
                f"{self._state.group.size}: weights and states are the same to the bit, random numbers go on from this "
                "job's own seed"
            )
        elif found.own:
            restore_random_states(found.own["rng"], state.device)
        else:
            self._warn(f"{found.checkpoint.folder} holds no random numbers: they go on from this job's own seed")


def _kind(optimizer: str) -> str:
    """Adam by any name keeps Adam's states."""
    name = optimizer.lower()
    return "adam" if name in ("adam", "adamw", "fusedadam", "deepspeedcpuadam") else name


def _find_candidates(load_dir: Path, tag: str | None, tried: Sequence[str]) -> Sequence[str]:
    found, warnings = folder.choose(load_dir, tag)
    if tried:  # what else there is was told before
        return [entry.tag for entry in found if not entry.problems and entry.tag not in tried]
    for warning in warnings:
        logger.warning("%s", warning)
    good = [entry.tag for entry in found if not entry.problems]
    # What `latest` names was published once, whatever is left of it.
    was_published = (load_dir / folder.LATEST).exists() or any(folder.is_tag_folder(entry.folder) for entry in found)
    if not good and tag is None and not was_published:
        logger.warning("%s holds no checkpoint", load_dir)
        return []
    bad = takewhile(lambda entry: entry.problems, found)
    problems = [f"checkpoint {entry.tag} cannot be loaded: {'; '.join(entry.problems)}" for entry in bad]
    if not good:
        raise CheckpointError(". ".join([*problems, *([] if problems else warnings)]))
    for problem in problems:
        logger.warning("%s. Taking checkpoint %s instead", problem, good[0])
    return good
