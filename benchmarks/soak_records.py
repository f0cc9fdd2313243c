"""The records of a soak job, and checks of its checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onefold.checkpoint.format import folder as folders
from onefold.checkpoint.format.files import CheckpointError
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


class Records:
    """The losses and events that the ranks of a job have written. A step that is repeated must have the same losses."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self.losses: list[dict[int, list[str]]] = [{} for _ in range(num_ranks)]
        """The losses of each step, by rank."""
        self.newest_step = 0
        self.num_repeated = 0
        """Steps that rank 0 has computed again."""
        self.surely_published = 0
        """The newest step of which a save was complete."""
        self.events: list[dict[str, Any]] = []
        """The events of rank 0."""
        self._tails = [_Tail(folder / f"losses.{rank}") for rank in range(num_ranks)]
        self._event_tail = _Tail(folder / "events.0")

    def read(self) -> list[str]:
        """Read new lines. Return the differences between repeated steps."""
        problems = []
        for rank, tail in enumerate(self._tails):
            for line in tail.lines():
                number, pid, *losses = line.split()
                step = int(number)
                before = self.losses[rank].setdefault(step, losses)
                if rank == 0:
                    self.num_repeated += before is not losses
                    self.newest_step = max(self.newest_step, step)
                if before != losses:
                    problems.append(
                        f"rank {rank}, step {step}, process {pid}: the losses {losses} differ from those of an earlier "
                        f"process, {before}"
                    )
        for line in self._event_tail.lines():
            event = json.loads(line)
            self.events.append(event)
            if event["event"] == "published":
                self.surely_published = max(self.surely_published, event["step"])
        return problems

    def compare(self, reference: Records) -> list[str]:
        """Return the first difference of each rank from a run without faults."""
        problems = []
        for rank, (mine, theirs) in enumerate(zip(self.losses, reference.losses, strict=True)):
            if mine.keys() != theirs.keys():
                wrong = sorted(mine.keys() ^ theirs.keys())
                problems.append(f"rank {rank}: step {wrong[0]} and {len(wrong) - 1} others are in one run only")
            for step in sorted(mine.keys() & theirs.keys()):
                if mine[step] != theirs[step]:
                    problems.append(f"rank {rank}, step {step}: {mine[step]}, without faults {theirs[step]}")
                    break
        return problems


@dataclass
class FoundCheckpoints:
    """What a folder of checkpoints holds."""

    num_verified: int = 0
    newest_step: int = 0
    unpublished: set[str] = field(default_factory=set)
    """Data folders that no manifest names."""
    problems: list[str] = field(default_factory=list)


def verify_checkpoints(save_dir: Path, records: Records, *, damaged: frozenset[str] = frozenset()) -> FoundCheckpoints:
    """Read all published checkpoints, compare them with their checksums, and look for the newest complete save.

    `damaged` has the data folders that were damaged on purpose.
    """
    records.read()
    found = FoundCheckpoints()
    for tag_folder in sorted(path for path in save_dir.iterdir() if path.is_dir()):
        data = {f"{tag_folder.name}/{name}" for name in folders.data_folders(tag_folder)}
        if not folders.is_tag_folder(tag_folder):  # never published
            found.unpublished |= data
            continue
        checkpoint = folders.examine(tag_folder)
        if checkpoint.manifest is None:
            found.problems.append(f"{tag_folder} is published, but not loadable: {'; '.join(checkpoint.problems)}")
            continue
        named = {f"{tag_folder.name}/{name}" for name in checkpoint.manifest.data_folders}
        found.unpublished |= data - named
        if named & damaged:
            continue
        wrong = [*checkpoint.problems, *(f"{each.file}: {each.text}" for each in verify(checkpoint, lambda done: None))]
        if wrong:
            found.problems.append(f"{tag_folder} is published, but not loadable: {'; '.join(wrong)}")
        found.num_verified += 1
        found.newest_step = max(found.newest_step, checkpoint.manifest.global_steps)
    try:
        latest = folders.read_latest(save_dir)
        if latest is not None and not folders.is_tag_folder(save_dir / latest):
            found.problems.append(f"`latest` names {latest}, which is not published")
    except CheckpointError as error:
        found.problems.append(str(error))
    if found.newest_step < records.surely_published and not damaged:
        found.problems.append(
            f"the newest checkpoint is of step {found.newest_step}, but that of step {records.surely_published} was "
            "complete"
        )
    return found
