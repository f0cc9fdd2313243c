"""What ranks tell each other about a save, and the files they leave for each other until it is published."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from onefold.checkpoint import folder
from onefold.checkpoint.files import read_small
from onefold.checkpoint.manifest import MAX_BYTES, Manifest, join_parts
from onefold.checkpoint.shards import Record, Slot
from onefold.log import logger

# A shared file system may show another host's new folder late.
_VISIBLE_SECONDS = 10.0
SCRIPT = "zero_to_fp32.py"


@dataclass(frozen=True)
class Order:
    """What all ranks need to know of a save. `steps`: the state after which step. `buffers`: rank 0's, by checksum."""

    number: int
    steps: int
    save_dir: str
    tag: str
    data: str
    save_latest: bool
    background: bool
    exclude_frozen: bool
    buffers: dict[str, int]

    @property
    def folder(self) -> Path:
        return Path(self.save_dir, self.tag, self.data)


@dataclass(frozen=True)
class Head:
    """What rank 0 alone adds: everything of the manifest that is not a file."""

    state: dict[str, Any]
    parameters: dict[str, int | None]
    aliases: dict[str, str]
    left_out: list[str]
    buffers: dict[str, int]


class Savable(Protocol):
    """The engine, as far as saving knows it."""

    def steps_done(self) -> int | None:
        """The number of steps behind what is held now; None in the middle of one."""

    def part_of(self, order: Order, *, joined: bool) -> tuple[list[Slot], dict[str, Any]]:
        """This rank's slots, and its own state. `joined`: not from a call of its program."""
        ...


@dataclass(frozen=True)
class Retention:
    """How many checkpoints stay: the newest, and those of every so many steps."""

    keep_last: int | None = None
    keep_every: int | None = None


class SaveError(RuntimeError):
    """A checkpoint could not be written; earlier ones are as they were."""


def as_order(note: dict[str, Any]) -> Order:
    if "refused" in note:
        raise SaveError(f"rank 0 could not save: {note['refused']}")
    return Order(**note)


def await_folder(path: Path) -> None:
    started = time.monotonic()
    while not path.is_dir():
        if time.monotonic() - started > _VISIBLE_SECONDS:
            raise FileNotFoundError(
                f"{path} is not there, though rank 0 has made it: save to a file system that all ranks share"
            )
        time.sleep(0.05)


def record_name(rank: int) -> str:
    return f"rank-{rank:05}.json"


def read_record(path: Path, rank: int) -> Record:
    try:
        record = Record.from_json(json.loads(read_small(path / record_name(rank), MAX_BYTES)))
        size = (path.parent / record.file.name).stat().st_size
    except FileNotFoundError:
        raise SaveError(
            f"rank {rank} has written its part, but rank 0 does not see it in {path}: save to a file system that all "
            "ranks share"
        ) from None
    if size != record.file.nbytes:
        raise SaveError(f"rank {rank} wrote {record.file.nbytes} bytes, rank 0 sees {size} of them in {path}")
    return record


def publish(order: Order, head: Head, num_ranks: int, writer: str) -> None:
    """Every rank has written: from here on the tag means this save."""
    records = [read_record(order.folder, rank) for rank in range(num_ranks)]
    manifest = Manifest(
        tag=order.tag,
        saved=datetime.now(UTC).isoformat(),
        global_steps=order.steps,
        world_size=num_ranks,
        files=tuple(record.file for record in records),
        tensors=join_parts(part for rank, record in enumerate(records) for part in record.numbered(rank)),
        parameters=head.parameters,
        state=head.state,
        ranks=[record.own for record in records],
        aliases=head.aliases,
        left_out=head.left_out,
        writer=writer,
    )
    write_script(Path(order.save_dir))
    folder.publish(Path(order.save_dir), manifest, save_latest=order.save_latest)


def tidy(order: Order, num_ranks: int, kept: Retention) -> None:
    """The checkpoint stands. A file that cannot be removed is no reason to fail."""
    try:
        for rank in range(num_ranks):
            (order.folder / record_name(rank)).unlink(missing_ok=True)
        folder.clean(order.folder.parent)
        folder.retain(Path(order.save_dir), keep_last=kept.keep_last, keep_every=kept.keep_every)
    except OSError as error:
        logger.warning("checkpoint %s is saved, but old files could not be removed: %s", order.tag, error)


def published(order: Order) -> set[str]:
    """The data that the tag means now."""
    try:
        return Manifest.read(order.folder.parent).data_folders
    except (ValueError, OSError):
        return set()


def stands(order: Order) -> bool:
    """Whether all of a save is on disk."""
    try:
        latest = folder.read_latest(Path(order.save_dir))
    except ValueError:
        latest = None
    return order.data in published(order) and (not order.save_latest or latest == order.tag)


def write_script(save_dir: Path) -> None:
    """DeepSpeed's users look for this beside their checkpoints."""
    content = Path(__file__).with_name(SCRIPT).read_bytes()
    path = save_dir / SCRIPT
    if not path.exists():
        folder.replace_file(path, content)
