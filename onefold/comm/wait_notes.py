"""What ranks note down while they wait, and what follows from the notes of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Words for places that the advice depends on.
INITIALIZE, INIT = "onefold.initialize", "onefold.zero.Init"
BEGIN, ENDED = "the beginning of a pass", "the end of its program"


@dataclass(frozen=True)
class Note:
    """What a rank waits for. `passes`, `progress`, `heard`: where it is in the program that all ranks follow."""

    number: int
    what: str
    passes: int = 0
    progress: int = 0
    heard: bool = False
    ours: bool = True
    """False: a call of its program's own."""
    ranks: tuple[int, ...] | None = None
    """Whom such a call waits for; None: all."""
    lasts: bool = False
    """It has lasted for `PATIENCE`."""
    launched: int = 0
    """Collectives that the rank has launched."""
    computes: bool = False
    """It waits for nobody that we know of: it computes, or its device waits."""


def is_ahead(notes: dict[int, Note]) -> bool:
    """Whether a rank waits in a meeting for one that has launched more than it, and so will never come there."""
    lasting = [note for note in notes.values() if note.lasts]
    fewest = min((note.launched for note in lasting if note.ours and not note.computes), default=None)
    return fewest is not None and any(note.launched > fewest for note in lasting)


def is_stuck(notes: dict[int, Note]) -> bool:
    """Whether these notes, one of each rank, can never come together."""
    if any(note.computes for note in notes.values()):
        return False
    ours = {rank for rank, note in notes.items() if note.ours}
    if not ours or not all(note.lasts for note in notes.values()):
        return False
    if len(ours) == len(notes):
        return len({note.what for note in notes.values()}) > 1
    # A program's own call among ranks that all make such calls may only be slow.
    calls = [note for note in notes.values() if not note.ours]
    return all(note.ranks is None or ours.intersection(note.ranks) for note in calls)


def describe(notes: dict[int, Note]) -> str:
    """Which ranks wait for what, and what to do about it."""
    by_operation: dict[str, list[int]] = {}
    for rank in sorted(notes):
        by_operation.setdefault(notes[rank].what, []).append(rank)
    stands = "; ".join(f"{name_ranks(ranks)} at {what}" for what, ranks in by_operation.items())
    return f"the ranks wait for different collectives: {stands}. {_advice(notes, by_operation)}"


def describe_loss(lost: Sequence[int], notes: dict[int, Note]) -> str:
    stands = "; ".join(f"rank {rank} at {note.what}" for rank, note in sorted(notes.items()) if rank not in lost)
    return (
        f"{name_ranks(lost)} {'is' if len(lost) == 1 else 'are'} gone, connections are closed. Others wait: {stands}. "
        "Look at the end of that rank's log (a crash, out of memory, a signal)"
    )


def _advice(notes: dict[int, Note], by_operation: dict[str, list[int]]) -> str:
    if any(not note.ours and not note.computes for note in notes.values()):
        return (
            "A rank in a call of its own cannot serve the others: let every rank use the engine equally often before "
            "that call (in an evaluation: as many batches on every rank), or put the call where all ranks come to it"
        )
    if any(what.startswith((INITIALIZE, INIT)) for what in by_operation):
        return "Let every rank make the same engines, and zero.Init models, in the same order"
    if ENDED in by_operation:
        return "Let every rank take as many steps as the others, and save as often, before its program ends"
    return advice_on_divergence(by_operation.get(BEGIN, []), by_operation)


def advice_on_divergence(beginners: Sequence[int], whats: Iterable[str]) -> str:
    """What to do about programs that make different calls; `beginners`: ranks that began another forward."""
    within_pass = not any("GatheredParameters" in what or "load_checkpoint" in what for what in whats)
    if beginners and within_pass:
        return (
            f"{name_ranks(beginners).capitalize()} began a new forward while others were still in the pass, at its "
            "backward or step. If an error in a forward was caught there and another batch tried: catch errors before "
            "the forward, or skip the batch on all ranks; else let all ranks call forward, backward and step equally "
            "often"
        )
    return (
        "Their programs have diverged: let every rank make the same calls, of the same modules in the same order, or "
        "put the modules that only some ranks run into one unit with zero_optimization.leaf_module (or "
        "onefold.utils.set_z3_leaf_modules)"
    )


def name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
