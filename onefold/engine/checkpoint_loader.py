"""Load a checkpoint of any plan into an engine on any number of ranks. All ranks load the same one, or none does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from onefold.checkpoint.format import folder
from onefold.checkpoint.format.files import CheckpointError
from onefold.checkpoint.format.manifest import NAME, Manifest
from onefold.checkpoint.format.peer_copy import node_folder
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
from onefold.checkpoint.state.random_states import check_random_states, restore_random_states
from onefold.checkpoint.state.slots import loose_states
from onefold.comm import assert_same_by_exchange
from onefold.engine.checkpoint_saver import CheckpointSaver
from onefold.engine.peer_copies import PeerCopies
from onefold.engine.train_state import TrainState
from onefold.log import logger
from onefold.runtime import unsharded
from onefold.storage.place import Place, absolute, place


@dataclass(frozen=True)
class LoadOptions:
    """The parts of a checkpoint to load."""

    strict: bool
    """Whether names must match."""
    optimizer: bool
    """Whether to load optimizer states."""
    scheduler: bool
    """Whether to load the state of the learning-rate schedule."""
    job: bool
    """Whether to restore counters."""
    exactly: bool
    """Whether to restore random states and the data position."""
    custom: Callable[..., None] | None
    """A function of the user that loads the weights."""


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint that is open for reading, and what this rank reads of it."""

    checkpoint: CheckpointReader
    state: dict[str, Any]
    """The state that is the same on all ranks."""
    own: dict[str, Any]
    """The state of this rank: random states and the data position."""
    same_world: bool
    """Whether it was saved by as many ranks."""
    whole: dict[str, torch.Tensor]
    """Unsharded weights, for a function of the user."""
    groups: list[dict[str, Any]]
    """Hyperparameters for each group of the optimizer."""
    reads: list[Slot]
    """Ranges of tensors to read, with the memory to read them into."""


class CheckpointLoader:
    """Loads checkpoints into the train state of one engine. All ranks call it together."""

    def __init__(self, state: TrainState, saver: CheckpointSaver, copies: PeerCopies) -> None:
        self._state = state
        self._saver = saver
        self._copies = copies

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
        keeps_position: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint and return its path and client state, or (None, None). See `Engine.load_checkpoint`.

        `keeps_position`: do not restore the data position and random states.
        """
        state = self._state
        state.schedule.check_awake()
        state.flush()
        self._saver.finish()
        state.schedule.synchronize_for_load()
        if state.step is not None:
            state.step.about_to_write()
        state.drop_gradients()
        state.window.restart()
        options = LoadOptions(
            strict=strict,
            optimizer=optimizer_states and not module_only and state.step is not None,
            scheduler=lr_scheduler_states and not module_only and state.lr_scheduler is not None,
            job=not module_only,
            exactly=not module_only and not keeps_position and (optimizer_states or state.step is None),
            custom=custom,
        )
        # Each rank reads its shards. Folders may differ between ranks, because nodes may mount them at other paths.
        given = {
            "tag": str(tag),
            "load_module_strict": str(strict),
            "load_optimizer_states": str(optimizer_states),
            "load_lr_scheduler_states": str(lr_scheduler_states),
            "load_module_only": str(module_only),
            "custom_load_fn": "a function" if custom is not None else "None",
        }
        advice = "Call load_checkpoint with the same arguments on every rank"
        assert_same_by_exchange(state.schedule.agreement, "load_checkpoint", [("the call", given)], advice)
        resumes = tag is None and options.exactly and strict and custom is None and lr_scheduler_states
        goes_back = state.global_steps > 0
        names, tried = (
            self._candidates(load_dir, tag, copies=self._copies.take_resumable() if resumes else ()),
            list[str](),
        )
        while names:
            with ExitStack() as stack:
                problem, found = self._read(_folder_of(load_dir, names[0]), options, stack)
                if found is not None:
                    if _is_copy(names[0]) and state.group.rank == 0:
                        logger.info("resuming from the peer copy after step %d", found.checkpoint.manifest.global_steps)
                    # A rollback needs a checkpoint: the copy is removed as soon as there are newer ones.
                    stays = next((name for name in names if not _is_copy(name)), None)
                    if options.optimizer and custom is None and stays is not None:
                        self._saver.last = absolute(place(load_dir) / stays)
                    client_state = self._finish(found, options)
                    if _is_copy(names[0]):
                        self._copies.after_load(names[0].removeprefix("/"))
                    if goes_back:
                        self._copies.reject()
                    return str(found.checkpoint.folder), client_state
            tried.append(names.pop(0))
            if not names and tag is None:  # another running job may have saved new ones and removed these
                names = self._candidates(load_dir, tag, tried)
            if not names:
                other = "" if tag is not None else f". {load_dir} has no other complete checkpoint"
                raise CheckpointError(f"{problem}{other}")
            self._warn(f"{problem}. Loading checkpoint {names[0]} instead")
        return None, None

    def _warn(self, message: str) -> None:
        """Log a warning on rank 0."""
        if self._state.group.rank == 0:
            logger.warning("%s", message)

    def _candidates(
        self, load_dir: str, tag: str | None, tried: Sequence[str] = (), copies: Sequence[str] = ()
    ) -> list[str]:
        """Return the tags to try, best first, as rank 0 finds them. Return none if there is nothing to load.

        The names of peer copies that are newer than the best tag come first, and begin with a slash.
        """
        text = error = ""
        if self._state.group.rank == 0:
            try:
                text = "\n".join(_with_copies(copies, place(load_dir), tag, tried))
            except (ValueError, OSError) as found:
                error = str(found)
        published = self._state.schedule.agreement.broadcast_text("load_checkpoint", f"{error}\0{text}")
        error, _, text = published.partition("\0")
        if error:
            raise CheckpointError(error)
        return text.split("\n") if text else []

    def _read(self, path: Place, options: LoadOptions, stack: ExitStack) -> tuple[str, OpenCheckpoint | None]:
        """Read what this rank needs of a checkpoint.

        Return a description of the damage and None if any rank finds the checkpoint damaged.
        """
        opened: list[OpenCheckpoint] = []

        def prepare() -> None:
            checkpoint = stack.enter_context(CheckpointReader.open(path))
            checkpoint.check_headers()
            state = checkpoint.state
            same_world = checkpoint.manifest.world_size == self._state.group.size
            own = checkpoint.own(self._state.group.rank if same_world else 0) if options.exactly else {}
            reads = [] if options.custom else weight_reads(checkpoint, self._target, strict=options.strict)
            whole: dict[str, torch.Tensor] = {}
            if options.custom:
                whole = {name: checkpoint.tensor(f"model/{name}") for name in checkpoint.names("model/")}
                whole |= {a: whole[name] for a, name in checkpoint.manifest.aliases.items() if name in whole}
            groups: list[dict[str, Any]] = []
            if options.optimizer:
                reads += self._optimizer_reads(checkpoint, state["optimizer"], options)
                groups = groups_for(checkpoint, self._target, state["optimizer"]["groups"])
            found = OpenCheckpoint(checkpoint, state, own, same_world, whole, groups, reads)
            self._check_values(found, options)
            if self._state.global_steps:  # the live state would be lost
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
        # Values are written from here on. `_finish` clears this mark; after an error it remains set on all ranks.
        self._state.half_loaded = f"load_checkpoint of {path} failed half-way on another rank"
        problem = self._agree(lambda: self._fill(opened[0]))
        if problem:
            self._state.half_loaded = f"load_checkpoint of {path} failed half-way: {problem}"
        return problem, None if problem else opened[0]

    def _fill(self, opened: OpenCheckpoint) -> None:
        """Read the tensors into their memory, and warn if their state format rounds them."""
        rounded = sorted(fill(opened.checkpoint, opened.reads))
        if rounded and self._state.group.rank == 0:
            formats = self._state.plan.formats
            logger.warning(
                "%s: masters are stored as %s and optimizer states as %s in this job, so %d tensors of this rank, "
                "beginning with %s, were rounded. The resumed run differs from one with the saved formats",
                opened.checkpoint.folder, formats.masters, formats.states, len(rounded), rounded[0],
            )  # fmt: skip

    def _check_values(self, found: OpenCheckpoint, options: LoadOptions) -> None:
        """Check all values that are not tensors before a tensor is written, so that restoring them cannot fail."""
        path, state = found.checkpoint.folder / NAME, found.state
        try:
            if options.optimizer:
                assert self._state.step is not None
                check_groups(found.groups, self._state.step.groups)
            if self._restores_schedule(found, options):
                scheduler, step = self._state.lr_scheduler, self._state.step
                check_schedule(state["lr_scheduler"], scheduler)
                groups = step.groups if step is not None else []
                check_taken(state["lr_scheduler"], scheduler, groups, "state.lr_scheduler")
            if self._restores_data(found, options):
                loader = self._state.training_dataloader
                if hasattr(loader, "check_state"):
                    loader.check_state(found.own["data"])
                else:
                    check_taken(found.own["data"], loader, [], "data")
            if options.exactly and found.same_world and found.own:
                check_random_states(found.own["rng"], self._state.device)
        except MisfitError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def _restores_schedule(self, found: OpenCheckpoint, options: LoadOptions) -> bool:
        """Return whether the state of the learning-rate schedule is restored."""
        has_state = options.scheduler and found.state["lr_scheduler"] is not None
        return has_state and hasattr(self._state.lr_scheduler, "load_state_dict")

    def _restores_data(self, found: OpenCheckpoint, options: LoadOptions) -> bool:
        """Return whether the position in the data is restored."""
        has_position = options.exactly and found.own.get("data") is not None
        return has_position and hasattr(self._state.training_dataloader, "load_state_dict")

    @property
    def _target(self) -> LoadTarget:
        state = self._state
        return LoadTarget(state.model, state.schedule.units, state.step, state.group.rank, state.group.size)

    def _agree(self, work: Callable[[], None]) -> str:
        """Run `work` on this rank. Return damage that any rank finds on all ranks; raise other errors on all ranks."""
        kind, caught = 0, None
        try:
            work()
        except Exception as error:
            caught = error
            kind = 1 if isinstance(error, CheckpointError | OSError) else 2 if isinstance(error, MisfitError) else 3
        kinds = self._state.schedule.synchronize_for_load(kind)
        if not any(kinds):
            return ""
        worst = kinds.index(max(kinds))
        message = self._state.schedule.agreement.broadcast_text("load_checkpoint", str(caught or ""), worst)
        if kind == 3:
            assert caught is not None
            raise caught
        if max(kinds) == 3:
            raise RuntimeError(f"load_checkpoint failed on rank {worst}: {message}")
        if max(kinds) == 2:
            raise MisfitError(message)
        return message

    def _optimizer_reads(
        self, checkpoint: CheckpointReader, saved: dict[str, Any] | None, options: LoadOptions
    ) -> list[Slot]:
        if saved is None:
            raise MisfitError(f"{checkpoint.folder} was saved without an optimizer. Pass load_optimizer_states=False.")
        step = self._state.step
        assert step is not None
        if saved["name"] is not None and _kind(saved["name"]) != _kind(step.name):
            raise MisfitError(
                f"{checkpoint.folder} has the states of {saved['name']}, not of {step.name}. "
                "Pass load_optimizer_states=False to leave the optimizer unchanged."
            )
        loose: dict[str, Any] = {}
        for rank in range(checkpoint.manifest.world_size):
            for name, values in checkpoint.loose(rank).items():
                loose.setdefault(name, {}).update(values)
        misfits = step.misfits(loose)
        if misfits and options.strict:
            raise MisfitError(
                f"{checkpoint.folder} was saved with a different split_rows:\n  "
                + "\n  ".join(misfits.values())
                + "\nSet split_rows to the saved value. load_module_strict=False resets the optimizer states of these "
                "parameters, and load_optimizer_states=False resets all optimizer states."
            )
        for name, words in misfits.items():
            self._warn(f"{checkpoint.folder}: {words}. Its optimizer states are reset")
            del loose[name]
        try:
            if saved["num_steps"]:  # there are no states before the first step
                check_loose_like(loose, loose_states(self._state.schedule.units, step))
        except ValueError as error:
            raise CheckpointError(f"{checkpoint.folder / NAME}: {error}") from error
        return state_reads(checkpoint, self._target, loose, strict=options.strict and saved["num_steps"] > 0)

    def _finish(self, found: OpenCheckpoint, options: LoadOptions) -> dict[str, Any]:
        """Resume from the tensors that were read: update parameters, optimizer, schedule and counters.

        Return the client state.
        """
        state, step = found.state, self._state.step
        if options.custom is not None:
            # The user's function copies an unsharded state dict into the unsharded model.
            with unsharded(self._state.model.parameters()) as handles:
                options.custom(src=found.whole, dst=self._state.model)
                for handle in handles:
                    handle.take_values_of(0)
        else:
            # The masters are loaded. Copy them to the model weights, and all-gather these.
            with torch.no_grad():
                for store in step.stores if step is not None else ():
                    store.sync_model_weight_from_master().synchronize()
                self._state.schedule.gather_loaded()
        if options.optimizer:
            assert step is not None
            step.resume(state["optimizer"]["num_steps"])
            if not step.take_groups(found.groups):
                self._warn(
                    f"{found.checkpoint.folder} has other optimizer states than {step.name}. The learning rate "
                    "and the other hyperparameters keep the values of this job's config"
                )
            step.attributes.take(state["optimizer"].get("attributes", {}))
            # A dynamic loss scale is restored. A fixed one keeps the value of the config.
            scale, saved = self._state.decision.loss_scale, state["loss_scale"] or {}
            if "iteration" in saved and "iteration" in scale.state_dict():
                scale.load_state_dict(saved)
        if self._restores_schedule(found, options):
            self._state.lr_scheduler.load_state_dict(state["lr_scheduler"])
        elif options.scheduler and state["lr_scheduler"] is None:
            self._warn(f"{found.checkpoint.folder} has no scheduler state. The learning-rate schedule starts at step 0")
        if options.job:
            self._restore_job(found, options)
        self._saver.remember_step()
        self._state.half_loaded = ""
        client_state: dict[str, Any] = state["client_state"]
        return client_state

    def _restore_job(self, found: OpenCheckpoint, options: LoadOptions) -> None:
        """Restore counters, the data position and random states."""
        state, counters = self._state, found.state["counters"]
        state.global_steps = counters["global_steps"]
        state.global_samples = counters["global_samples"]
        state.skipped_steps = counters["skipped_steps"]
        state.window.resume(counters["micro_steps"])
        state.decision.forget_norm()
        for name, spikes in state.decision.spike_guards.items():
            spikes.load_state_dict(found.state.get(name, ()))
        if not options.exactly:
            return
        if self._restores_data(found, options):
            state.training_dataloader.load_state_dict(found.own["data"])
        if not found.same_world:
            self._warn(
                f"{found.checkpoint.folder} was saved by {found.checkpoint.manifest.world_size} ranks; this job has "
                f"{self._state.group.size}. Weights and states are restored bit-exactly, but random number generators "
                "keep the seeds of this job"
            )
        elif found.own:
            restore_random_states(found.own["rng"], state.device)
        else:
            self._warn(
                f"{found.checkpoint.folder} has no random states. Random number generators keep the seeds of this job"
            )


def _is_copy(name: str) -> bool:
    return name.startswith("/")


def _folder_of(load_dir: str, name: str) -> Place:
    """Return the folder of a tag, or of a peer copy on this node."""
    return node_folder() / name[1:] if _is_copy(name) else place(load_dir) / name


def _with_copies(copies: Sequence[str], load_dir: Place, tag: str | None, tried: Sequence[str]) -> Sequence[str]:
    """Return the tags of complete checkpoints in a folder, best first, after the peer copies that are newer."""
    if not copies:
        return _find_candidates(load_dir, tag, tried)
    names: Sequence[str] = []
    saved, has_client_state = "", False
    try:
        names = _find_candidates(load_dir, tag, tried)
        if names:
            best = Manifest.read(load_dir / names[0])
            saved, has_client_state = best.saved, bool(best.state["client_state"])
    except (ValueError, OSError) as error:
        logger.warning("%s. Peer copies are tried first", error)
    newer = []
    for copy in copies:
        try:
            manifest = Manifest.read(node_folder() / copy)
        except (ValueError, OSError) as error:
            logger.warning("%s. The peer copy is skipped", error)
            continue
        if manifest.saved > saved:
            newer.append((copy, manifest))
    if has_client_state and any(not manifest.state["client_state"] for _, manifest in newer):
        logger.warning(
            "the peer copy of step %d is not loaded, because the checkpoint %s has a client state, and the copy has "
            "none. Call engine.set_client_state_of_copies to give copies one",
            newer[0][1].global_steps, load_dir / names[0],
        )  # fmt: skip
        newer = []
    return [*(f"/{copy}" for copy, _ in newer), *names]


def _kind(optimizer: str) -> str:
    """Return a common name for optimizers that keep the same states."""
    name = optimizer.lower()
    return "adam" if name in ("adam", "adamw", "fusedadam", "deepspeedcpuadam") else name


def _find_candidates(load_dir: Place, tag: str | None, tried: Sequence[str]) -> Sequence[str]:
    """Return the tags of complete checkpoints in a folder, best first. Raise if all of them are damaged."""
    found, warnings = folder.choose(load_dir, tag)
    if tried:  # warnings about the others were logged before
        return [entry.tag for entry in found if not entry.problems and entry.tag not in tried]
    for warning in warnings:
        logger.warning("%s", warning)
    good = [entry.tag for entry in found if not entry.problems]
    # A tag in `latest` was published once, even if its folder is now gone.
    was_published = (load_dir / folder.LATEST).exists() or any(folder.is_tag_folder(entry.folder) for entry in found)
    if not good and tag is None and not was_published:
        logger.warning("%s contains no checkpoint", load_dir)
        return []
    bad = takewhile(lambda entry: entry.problems, found)
    problems = [f"checkpoint {entry.tag} cannot be loaded: {'; '.join(entry.problems)}" for entry in bad]
    if not good:
        raise CheckpointError(". ".join([*problems, *([] if problems else warnings)]))
    for problem in problems:
        logger.warning("%s. Loading checkpoint %s instead", problem, good[0])
    return good
