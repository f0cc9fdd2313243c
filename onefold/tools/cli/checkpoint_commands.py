"""Run `onefold export`, `onefold import-deepspeed`, `onefold import-dcp` and `onefold ckpt`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import groupby
from typing import Any

from onefold.checkpoint.format import folder
from onefold.checkpoint.format.files import CheckpointError, RemovedError
from onefold.checkpoint.format.folder import LATEST, FoundCheckpoint, data_folders, is_deepspeeds, list_tags
from onefold.checkpoint.format.shard_files import TRIES
from onefold.checkpoint.tools import audit
from onefold.checkpoint.tools import export as exporting
from onefold.checkpoint.tools.audit import Damage, spell, unpublished_bytes
from onefold.checkpoint.tools.export import find_checkpoint
from onefold.checkpoint.tools.import_checkpoint import import_dcp, import_deepspeed
from onefold.log import format_bytes
from onefold.storage.place import Place, place, replace_file, tree_size
from onefold.tools.cli.terminal import fails_on, print_table, progress_bar
from onefold.tools.cli.usage import UsageError

# The most damages of one file that are printed.
_SHOWN_DAMAGES = 10


@fails_on(CheckpointError, OSError)
def export(options: argparse.Namespace) -> int:
    """Run `onefold export`."""
    if options.format == "dcp" and options.max_shard_size is not None:
        raise UsageError("--max-shard-size: the format dcp has one file. Leave it out.")
    with progress_bar("export") as show_progress:
        exported = exporting.export(
            options.checkpoint,
            options.out,
            tag=options.tag,
            dtype=options.dtype,
            file_format=options.format,
            max_shard_size=options.max_shard_size or exporting.SHARD_SIZE,
            exclude_frozen=options.exclude_frozen,
            progress=show_progress,
        )
    size = f"{format_bytes(exported.nbytes)} of {options.dtype}"
    print(f"{exported.num_tensors} tensors of {exported.checkpoint}, {size}:", *exported.files, sep="\n  ")
    return 0


@fails_on(ValueError, OSError)
def import_checkpoint(options: argparse.Namespace) -> int:
    """Run `onefold import-deepspeed`."""
    with progress_bar("import") as show_progress:
        found = import_deepspeed(options.source, options.out, options.tag, show_progress)
    counters = found.source.state["counters"]
    print(
        f"{found.folder}: step {counters['global_steps']}, {len(found.source.parameters)} parameters, "
        f"{format_bytes(found.nbytes)}, from stage {found.source.stage} on {found.source.world_size} ranks"
    )
    for key in found.left_out:
        print(f"left out: client state {key!r} is not plain data")
    return 0


@fails_on(ValueError, OSError)
def import_of_torch(options: argparse.Namespace) -> int:
    """Run `onefold import-dcp`."""
    with progress_bar("import") as show_progress:
        found = import_dcp(options.source, options.out, options.tag, options.leave_out, show_progress)
    steps, weights = found.source.state["counters"]["global_steps"], len(found.source.model_names)
    states = "with optimizer states" if found.source.state["optimizer"] else "without an optimizer"
    print(f"{found.folder}: step {steps}, {weights} weights, {format_bytes(found.nbytes)}, {states}")
    for name in found.left_out:
        print(f"left out: {name}")
    return 0


@fails_on(CheckpointError, OSError)
def list_checkpoints(options: argparse.Namespace) -> int:
    """Run `onefold ckpt ls`."""
    path = place(options.dir)
    latest, problem = folder.latest_of(path.resolve().parent if folder.is_tag_folder(path) else path)
    rows = [{**audit.summary(found), "latest": found.tag == latest} for found in audit.list_all(path)]
    if options.json:
        facts = {"folder": str(path), "latest": latest, "problem_of_latest": problem, "checkpoints": rows}
        print(json.dumps(facts, indent=2))
        return 0
    if rows:
        print_table(("tag", "", ">steps", "saved", ">size", ">ranks", "state"), map(_cells, rows))
    else:
        print(f"{path} contains no checkpoint")
    for row in rows:
        for line in row["problems"]:
            print(f"{row['tag']}: {line}")
        if row["unpublished_bytes"]:
            unpublished = f"{row['tag']}: {format_bytes(row['unpublished_bytes'])} of a save that is in progress or"
            print(f"{unpublished} was interrupted (to remove the latter: onefold ckpt rm {path} --leftovers)")
    if problem:
        print(problem)
    return 0


def _cells(row: dict[str, Any]) -> Sequence[str]:
    steps, ranks = ("" if row[key] is None else f"{row[key]:,}" for key in ("steps", "ranks"))
    is_latest = "latest" if row["latest"] else ""
    return row["tag"], is_latest, steps, _when(row["saved"]), format_bytes(row["bytes"]), ranks, row["state"]


def _when(saved: str | None) -> str:
    """Return a time stamp in the local time zone."""
    return "" if saved is None else f"{datetime.fromisoformat(saved).astimezone():%Y-%m-%d %H:%M}"


@fails_on(CheckpointError, OSError)
def inspect_checkpoint(options: argparse.Namespace) -> int:
    """Run `onefold ckpt inspect`."""
    found = find_checkpoint(options.dir, options.tag)
    if found.manifest is None:
        raise CheckpointError("; ".join(found.problems))
    facts = audit.describe(found.folder, found.manifest, found.problems)
    if options.tensors:
        facts["tensors"] = audit.describe_tensors(found.manifest)
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    for name, text in _lines(facts):
        print(f"{name:<16}{text}")
    print()
    print_table(("kind", ">tensors", ">elements", ">size", "dtypes"), map(_kind_cells, facts["kinds"]))
    print()
    print_table(("file", ">size"), ((file["name"], format_bytes(file["bytes"])) for file in facts["files"]))
    if options.tensors:
        print()
        print_table(
            ("tensor", "dtype", "shape", ">size"),
            ((row["name"], row["dtype"], str(row["shape"]), format_bytes(row["bytes"])) for row in facts["tensors"]),
        )
    print(f"\nconfig\n{json.dumps(facts['config'], indent=2)}")
    return 0


def _kind_cells(kind: dict[str, Any]) -> Sequence[str]:
    numbers = f"{kind['tensors']:,}", f"{kind['elements']:,}", format_bytes(kind["bytes"])
    return kind["kind"], *numbers, ", ".join(kind["dtypes"])


def _lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "tag", facts["tag"]
    yield "folder", facts["folder"]
    yield "saved", f"{_when(facts['saved'])}, by {facts['writer']}, on {_count(facts['ranks'], 'rank')}"
    yield "size", f"{format_bytes(facts['bytes'])} in {_count(len(facts['files']), 'file')}"
    yield "complete", "yes (sizes and headers)" if facts["complete"] else "no"
    for problem in facts["problems"]:
        yield "", problem
    for name, count in (facts["counters"] or {}).items():
        yield name.replace("_", " "), f"{count:,}"
    optimizer = facts["optimizer"] or {"name": "none", "num_steps": 0, "groups": []}
    yield "optimizer", f"{optimizer['name']}, {optimizer['num_steps']:,} steps"
    for index, group in enumerate(optimizer["groups"]):
        values = ", ".join(f"{key} {spell(value)}" for key, value in group.items())
        yield f"  group {index}", f"parameters {facts['parameters_by_group'].get(str(index), 0)}, {values}"
    if "frozen" in facts["parameters_by_group"]:
        yield "  frozen", f"parameters {facts['parameters_by_group']['frozen']}"
    yield "not saved", f"{len(facts['left_out'])} frozen parameters" if facts["left_out"] else "nothing"
    yield "tied names", ", ".join(f"{alias} = {name}" for alias, name in facts["aliases"].items()) or "none"
    for key in ("lr_scheduler", "loss_scale"):
        yield key.replace("_", " "), _named(facts[key]) if facts[key] is not None else "none"
    yield "client state", ", ".join(facts["client_state_keys"]) or "empty"


def _named(state: Any) -> str:
    """Format a state on one line, a dictionary as its names and values."""
    if isinstance(state, dict) and not any(str(key).startswith("$") for key in state):
        return ", ".join(f"{key} {spell(value)}" for key, value in state.items()) or "empty"
    return spell(state)


@fails_on(CheckpointError, OSError)
def verify_checkpoints(options: argparse.Namespace) -> int:
    """Run `onefold ckpt verify`."""
    path = place(options.dir)
    is_one = options.tag is not None or folder.is_tag_folder(path)
    for left in reversed(range(TRIES)):
        chosen = list_tags(path) if options.all and not is_one else []
        chosen = chosen or [find_checkpoint(path, options.tag)]
        if any(is_deepspeeds(found.folder) for found in chosen if found.manifest is None):
            raise CheckpointError("; ".join(problem for found in chosen for problem in found.problems))
        problem = None if is_one else folder.latest_of(path)[1]
        try:
            results = _verify(chosen)
            break
        except RemovedError:  # a job removed an old checkpoint; look again
            if is_one or not left:
                raise
    is_fine = not problem and not any(damages for _, damages in results)
    if options.json:
        rows = [
            {
                "tag": found.tag,
                "folder": str(found.folder),
                "ok": not damages,
                "bytes": found.manifest.nbytes if found.manifest is not None else 0,
                "damages": [damage.as_json() for damage in damages],
            }
            for found, damages in results
        ]
        print(json.dumps({"ok": is_fine, "problem_of_latest": problem, "checkpoints": rows}, indent=2))
        return 0 if is_fine else 1
    for found, damages in results:
        if damages:
            print(f"{found.tag}: damaged in {_count(len(damages), 'place')}", *_by_file(damages), sep="\n  ")
        elif found.manifest is None:
            print(f"{found.tag}: no published checkpoint")
        else:
            print(f"{found.tag}: valid, {format_bytes(found.manifest.nbytes)} match their checksums")
    if problem:
        print(problem)
    return 0 if is_fine else 1


def _by_file(damages: Sequence[Damage]) -> Iterator[str]:
    """Yield each damaged file, followed by its damages."""
    for file, found in groupby(damages, key=lambda damage: damage.file):
        inside = list(found)
        yield f"{file}:"
        yield from (f"  {damage.text}" for damage in inside[:_SHOWN_DAMAGES])
        if len(inside) > _SHOWN_DAMAGES:
            yield f"  and {len(inside) - _SHOWN_DAMAGES} more (--json lists all)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _verify(chosen: Sequence[FoundCheckpoint]) -> list[tuple[FoundCheckpoint, list[Damage]]]:
    total = sum(found.manifest.nbytes for found in chosen if found.manifest is not None)
    done = 0
    results = []
    with progress_bar("verify") as show_progress:

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            show_progress(found.tag, done, total)

        for found in chosen:
            # A folder without a manifest is not damaged among others, because it was never published.
            unpublished = len(chosen) > 1 and not folder.is_tag_folder(found.folder)
            results.append((found, [] if unpublished else list(audit.verify(found, advance))))
    return results


@fails_on(CheckpointError, OSError)
def remove_checkpoints(options: argparse.Namespace) -> int:
    """Run `onefold ckpt rm`. All arguments are checked before anything is removed."""
    save_dir = place(options.dir)
    if not options.tags and not options.leftovers:
        raise UsageError("rm: no tag is given. Name the tags to remove, or give --leftovers.")
    latest, _ = folder.latest_of(save_dir)
    found = {entry.tag: entry for entry in list_tags(save_dir)}
    for tag in options.tags:
        _check_removable(save_dir, tag, found)
    if latest in options.tags and not options.force:
        raise UsageError(f"{latest} is named in the file `latest`: jobs resume from it. Give --force to remove it.")
    chosen = [found[tag] for tag in dict.fromkeys(options.tags)]
    staying = [entry for entry in found.values() if entry.tag not in options.tags]
    unclean = [entry for entry in staying if unpublished_bytes(entry)] if options.leftovers else []
    if not chosen and not unclean:
        print(f"{save_dir}: there are no leftovers")
        return 0
    for entry in chosen:
        print(f"{entry.tag}: {format_bytes(tree_size(entry.folder))}{', damaged' if entry.problems else ''}")
    for entry in unclean:
        print(f"{entry.tag}: {format_bytes(unpublished_bytes(entry))} of interrupted saves")
    if not options.yes and not _confirm(f"remove from {save_dir}?"):
        print("nothing was removed")
        return 1
    if latest in options.tags:
        _move_latest(save_dir, [entry.tag for entry in staying if not entry.problems])
    for entry in chosen:
        _remove(entry)
    for entry in unclean:
        _clean(entry)
    return 0


def _check_removable(save_dir: Place, tag: str, found: dict[str, FoundCheckpoint]) -> None:
    if tag not in found:
        why = "is a checkpoint of DeepSpeed" if is_deepspeeds(save_dir / tag) else "is not a checkpoint of onefold"
        there = f" Checkpoints of onefold: {', '.join(found)}." if found else ""
        raise UsageError(f"{save_dir / tag} {why}; it is not removed.{there}")
    if found[tag].manifest is None and not data_folders(found[tag].folder):
        raise UsageError(f"{save_dir / tag} has an unreadable manifest.json and no data; it is not removed.")


def _move_latest(save_dir: Place, complete: Sequence[str]) -> None:
    """Let `latest` name another tag, before its tag is removed."""
    if complete:
        replace_file(save_dir / LATEST, complete[0].encode())
        print(f"{LATEST}: now names {complete[0]}")
    else:
        (save_dir / LATEST).unlink()
        print(f"{LATEST}: removed, because no complete checkpoint is left")


def _remove(found: FoundCheckpoint) -> None:
    folder.remove(found.folder)
    print(f"{found.tag}: removed")
    stays = sorted(entry.name for entry in found.folder.iterdir()) if found.folder.exists() else []
    for name in stays:
        why = "is being written" if name in data_folders(found.folder) else "was not written by onefold"
        print(f"{found.tag}: {name} {why} and is kept")


def _clean(found: FoundCheckpoint) -> None:
    before = unpublished_bytes(found)
    folder.clean(found.folder)
    after = unpublished_bytes(found)
    print(f"{found.tag}: {format_bytes(before - after)} removed")
    if after:
        print(f"{found.tag}: {format_bytes(after)} are being written and are kept")
    if found.manifest is None:
        with suppress(OSError):  # not empty
            found.folder.rmdir()


def _confirm(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("rm asks for confirmation, but there is no terminal. Give --yes.")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False
