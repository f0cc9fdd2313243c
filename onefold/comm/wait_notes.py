"""Notes about what each rank waits for, and the rules that decide from all notes whether the job is stuck.

Pure data and functions: no process group, no thread, no store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Names of operations that the advice in an error message depends on.
INITIALIZE, INIT = "onefold.initialize", "onefold.zero.Init"
BEGIN, ENDED = "the beginning of a pass", "the end of its program"


@dataclass(frozen=True)
class WaitNote:
    """What one rank waits for, and how far its engine has come in the current pass."""

    number: int
    """The sequence number of the wait on its rank, so that two waits of one name differ."""
    what: str
    pass_number: int = 0
    progress: int = 0
    """The number of collectives launched in this pass."""
    saw_request: bool = False
    """Whether the rank has seen the request to leave the recorded order in this pass."""
    ours: bool = True
    """False for a call to torch.distributed that the user's program makes."""
    ranks: tuple[int, ...] | None = None
    """The ranks that such a call waits for; None for all ranks."""
    lasts: bool = False
    """Whether the wait has lasted for the detector's patience."""
    launched: int = 0
    """The number of collectives launched since the start of the process."""
    computes: bool = False
    """Whether no wait is known: the rank computes, or its device waits for a collective."""


def is_ahead(notes: dict[int, WaitNote]) -> bool:
    """Return whether a rank waits in a host exchange for one that has launched more collectives.

    All ranks reach an exchange after the same launches, so the rank that has launched more will never reach it.
    """
    lasting = [note for note in notes.values() if note.lasts]
    fewest = min((note.launched for note in lasting if note.ours and not note.computes), default=None)
    return fewest is not None and any(note.launched > fewest for note in lasting)


def is_stuck(notes: dict[int, WaitNote]) -> bool:
    """Return whether these notes, one per rank, describe waits that can never complete."""
    if any(note.computes for note in notes.values()):
        return False
    ours = {rank for rank, note in notes.items() if note.ours}
    if not ours or not all(note.lasts for note in notes.values()):
        return False
    if len(ours) == len(notes):
        return len({note.what for note in notes.values()}) > 1
    # A user's collective among ranks that are all inside such calls may only be slow.
    calls = [note for note in notes.values() if not note.ours]
    return all(note.ranks is None or ours.intersection(note.ranks) for note in calls)


def describe(notes: dict[int, WaitNote]) -> str:
    """Return an error message that names each rank's operation and suggests a remedy."""
    by_operation: dict[str, list[int]] = {}
    for rank in sorted(notes):
        by_operation.setdefault(notes[rank].what, []).append(rank)
    stands = "; ".join(f"{name_ranks(ranks)} at {what}" for what, ranks in by_operation.items())
    return f"the ranks wait for different collectives: {stands}. {_advice(notes, by_operation)}"


def describe_loss(lost: Sequence[int], notes: dict[int, WaitNote]) -> str:
    """Return an error message about ranks whose processes have died."""
    stands = "; ".join(f"rank {rank} at {note.what}" for rank, note in sorted(notes.items()) if rank not in lost)
    return (
        f"{name_ranks(lost)} {'has' if len(lost) == 1 else 'have'} ended: the connections are closed. Others wait: "
        f"{stands}. Check the end of that rank's log for a crash, a signal or an out-of-memory error."
    )


def _advice(notes: dict[int, WaitNote], by_operation: dict[str, list[int]]) -> str:
    if any(not note.ours and not note.computes for note in notes.values()):
        return (
            "A rank inside a torch.distributed call cannot join the engine's collectives. Use the engine equally often "
            "on every rank before that call (in an evaluation: the same number of batches), or make the call on all "
            "ranks."
        )
    if any(what.startswith((INITIALIZE, INIT)) for what in by_operation):
        return "Create the same engines and zero.Init models, in the same order, on every rank."
    if ENDED in by_operation:
        return "Run the same number of steps and saves on every rank before the program ends."
    return advice_on_divergence(by_operation.get(BEGIN, []), by_operation)


def advice_on_divergence(beginners: Sequence[int], whats: Iterable[str]) -> str:
    """Return what to do if the ranks' programs make different calls.

    `beginners` are the ranks that began another forward.
    """
    within_pass = not any("GatheredParameters" in what or "load_checkpoint" in what for what in whats)
    if beginners and within_pass:
        return (
            f"{name_ranks(beginners).capitalize()} began a new forward while others were still in the backward "
            "or step of the previous one. If an error in a forward was caught and another batch tried, catch errors "
            "before the forward, or skip the batch on all ranks. Otherwise, call forward, backward and step equally "
            "often on all ranks."
        )
    return (
        "Their programs have diverged. Call the same modules in the same order on every rank, or "
        "put the modules that only some ranks run into one unit with zero_optimization.leaf_module (or "
        "onefold.utils.set_z3_leaf_modules)."
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 1, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
