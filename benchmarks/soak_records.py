"""The records of a soak job, and checks of its checkpoints."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onefold.checkpoint.format import folder as folders
from onefold.checkpoint.format.files import CheckpointError, RemovedError
from onefold.checkpoint.tools.audit import verify


class _Tail:
    """A file that grows: its new lines."""

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, 0

    def lines(self) -> list[str]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            found = file.read()
        end = found.rfind(b"\n") + 1
        self._position += end
        return found[:end].decode().splitlines()


Segments = tuple[tuple[int, int], ...]


class Records:
    """The losses and events that the ranks of a job have written.

    A step that is repeated must have the same losses, if the steps before it were computed by the same numbers of
    ranks. `Segments` are these numbers: pairs of a step and of the number of ranks that have computed the steps after
    it.
    """

    def __init__(self, folder: Path, num_ranks: int) -> None:
        """`num_ranks`: the largest number of ranks of any start."""
        self.newest_step = 0
        self.num_repeated = 0
        """Steps that rank 0 has computed again."""
        self.surely_published = 0
        """The newest step of which a save was complete."""
        self.segments: Segments = ()
        """The numbers of ranks of the newest start and of the starts that it has resumed."""
        self.starts: list[dict[str, Any]] = []
        """For each start, the event with which rank 0 has resumed."""
        self.events: Counter[str] = Counter()
        """Events of rank 0 by name."""
        self._digests: dict[int, dict[int, str]] = {}
        self.position: dict[int, tuple[int, int]] = {}
        """The newest start and step of each rank."""
        self._losses: dict[tuple[Segments, int, int], list[str]] = {}
        self._segments: dict[int, Segments] = {}
        self._pids: dict[int, dict[int, int]] = {}
        self._loss_tails = [_Tail(folder / f"losses.{rank}") for rank in range(num_ranks)]
        self._event_tails = [_Tail(folder / f"events.{rank}") for rank in range(num_ranks)]
        self._unread: list[tuple[int, str]] = []

    def read(self) -> list[str]:
        """Read new lines. Return the differences between repeated steps."""
        self._unread += [(rank, line) for rank, tail in enumerate(self._loss_tails) for line in tail.lines()]
        for rank, tail in enumerate(self._event_tails):
            for line in tail.lines():
                self._add_event(rank, json.loads(line))
        problems, unread = [], []
        for rank, line in self._unread:
            number, start, *losses = line.split()
            if int(start) in self._segments:
                problems += self._add_losses(rank, int(number), int(start), losses)
            else:  # rank 0 has not written yet that it has resumed
                unread.append((rank, line))
        self._unread = unread
        return problems

    def _add_event(self, rank: int, event: dict[str, Any]) -> None:
        name = event["event"]
        if name == "resumed" and rank == 0:
            kept = tuple((first, world) for first, world in self.segments if first < event["step"])
            if not kept or kept[-1][1] != event["world"]:
                kept = (*kept, (event["step"], event["world"]))
            self.segments = self._segments[event["start"]] = kept
            self.starts.append(event)
        if name == "resumed":
            self._pids.setdefault(event["start"], {})[rank] = event["pid"]
        if name == "finished":
            self._digests.setdefault(event["start"], {})[rank] = event["digest"]
        if rank == 0:
            self.events[name] += 1
            if name == "published":
                self.surely_published = max(self.surely_published, event["step"])

    def _add_losses(self, rank: int, step: int, start: int, losses: list[str]) -> list[str]:
        key = (_until(self._segments[start], step), rank, step)
        before = self._losses.setdefault(key, losses)
        self.position[rank] = (start, step)
        if rank == 0:
            self.num_repeated += step <= self.newest_step
            self.newest_step = max(self.newest_step, step)
        if before == losses:
            return []
        return [f"rank {rank}, step {step}: the losses {losses} differ from those of an earlier process, {before}"]

    @property
    def pids(self) -> dict[int, int]:
        """The process ids of the ranks of the newest start."""
        return self._pids[self.starts[-1]["start"]] if self.starts else {}

    @property
    def digests(self) -> dict[int, str]:
        """The checksums of the weights and states of each rank of the newest start, after its last step."""
        return self._digests.get(self.starts[-1]["start"], {}) if self.starts else {}

    def curve(self) -> dict[tuple[int, int], list[str]]:
        """Return the losses of the run that is left, by rank and step."""
        last = self.position.get(0, (0, 0))[1]
        return {
            (rank, step): losses
            for (segments, rank, step), losses in self._losses.items()
            if step <= last and segments == _until(self.segments, step)
        }

    def compare(self, reference: Records) -> list[str]:
        """Return the first difference from a run without faults, and whether the runs have different steps."""
        mine, theirs = self.curve(), reference.curve()
        problems = []
        if alone := sorted(mine.keys() ^ theirs.keys(), key=lambda at: at[::-1]):
            problems.append(f"rank {alone[0][0]}, step {alone[0][1]} and {len(alone) - 1} others are in one run only")
        for rank, step in sorted(mine.keys() & theirs.keys(), key=lambda at: at[::-1]):
            if mine[rank, step] != theirs[rank, step]:
                both = f"{mine[rank, step]}, without faults {theirs[rank, step]}"
                problems.append(f"rank {rank}, step {step}: {both}")
                break
        return problems


def _until(segments: Segments, step: int) -> Segments:
    """Return the segments that computed the steps up to `step`."""
    return tuple((first, world) for first, world in segments if first < step)


@dataclass
class FoundCheckpoints:
    """What a folder of checkpoints holds."""

    newest_step: int = 0
    verified: set[str] = field(default_factory=set)
    """Data folders that were read."""
    unpublished: set[str] = field(default_factory=set)
    """Data folders that no manifest names."""
    problems: list[str] = field(default_factory=list)


def verify_checkpoints(save_dir: Path, skipped: Collection[str] = ()) -> FoundCheckpoints:
    """Read all published checkpoints, and compare them with their checksums.

    `skipped` has the data folders, and the tags whose manifests, are not examined. A running job may remove checkpoints
    meanwhile.
    """
    found = FoundCheckpoints()
    for tag_folder in sorted(path for path in save_dir.iterdir() if path.is_dir()):
        data = {f"{tag_folder.name}/{name}" for name in folders.data_folders(tag_folder)}
        if not folders.is_tag_folder(tag_folder):  # never published
            found.unpublished |= data
            continue
        checkpoint = folders.examine(tag_folder)
        if checkpoint.removed or (checkpoint.manifest is None and tag_folder.name in skipped):
            continue
        if checkpoint.manifest is None:
            found.problems.append(f"{tag_folder} is published, but not loadable: {'; '.join(checkpoint.problems)}")
            continue
        named = {f"{tag_folder.name}/{name}" for name in checkpoint.manifest.data_folders}
        found.unpublished |= data - named
        if named & {*skipped}:
            continue
        found.verified |= named
        try:
            damage = [*verify(checkpoint, lambda done: None)]
        except RemovedError:
            continue
        wrong = [*checkpoint.problems, *(f"{each.file}: {each.text}" for each in damage)]
        if wrong:
            found.problems.append(f"{tag_folder} is published, but not loadable: {'; '.join(wrong)}")
        found.newest_step = max(found.newest_step, checkpoint.manifest.global_steps)
    try:
        latest = folders.read_latest(save_dir)
        if latest is not None and not folders.is_tag_folder(save_dir / latest):
            found.problems.append(f"`latest` names {latest}, which is not published")
    except CheckpointError as error:
        found.problems.append(str(error))
    return found
