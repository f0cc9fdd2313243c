"""An engine's interface to the hang detector.

The engine publishes what it waits for and how far it is in a pass. It receives two things: the verdict, as an
exception, and the requests of other ranks to leave the recorded order of collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

import torch.distributed as dist

from onefold.comm.hang_detector import Disagreement, HangDetector, world_detector
from onefold.comm.rank_activity import PassTracker


class Guard:
    """Publishes the waits and the progress of one engine on one rank. Without groups there is no detector."""

    def __init__(self, *groups: dist.ProcessGroup) -> None:
        self._passes = PassTracker()
        self._detector: HangDetector | None = world_detector() if groups else None
        if self._detector is not None:
            for group in groups:
                self._detector.connections.add(group)

    # -- waits and the verdict ----------------------------------------------------------------------------------

    def waiting_for(self, operation: str, units: Sequence[str] = ()) -> AbstractContextManager[None]:
        """Return a context around a wait for other ranks."""
        return self._publish(operation, units, launches=False)

    def launching(self, operation: str, units: Sequence[str]) -> AbstractContextManager[None]:
        """Return a context around the launch of a collective."""
        return self._publish(operation, units, launches=True)

    def _publish(self, operation: str, units: Sequence[str], *, launches: bool) -> AbstractContextManager[None]:
        if self._detector is None:
            return nullcontext()
        what = f"{operation} {', '.join(units)}" if units else operation
        return self._detector.waiting_for(what, self._passes, launches=launches)

    def start(self) -> None:
        """Keep the detector running until `close`, because other ranks may wait for this one."""
        if self._detector is not None:
            self._detector.hold(id(self))

    def close(self) -> None:
        """Release the detector. Its thread ends with the last engine."""
        if self._detector is not None:
            self._detector.release(id(self))

    def check(self) -> None:
        """Raise `Disagreement` if the job is stuck."""
        if self._detector is not None:
            self._detector.check()

    @property
    def verdict(self) -> str | None:
        """Why the job is stuck, or None. For waits that are not in the backend, and so are not woken."""
        return self._detector.verdict if self._detector is not None else None

    def fail(self, verdict: str) -> NoReturn:
        """Raise a verdict that every rank has reached, and end the waits of devices for each other."""
        if self._detector is None:
            raise Disagreement(verdict)
        if self._detector.connections.device_waits:
            self._detector.announce(verdict)
        self._detector.raise_verdict(verdict)

    # -- progress in a pass, and requests to leave the recorded order -------------------------------------------

    def number_passes_from(self, first: int) -> None:
        """Set the number before the first pass. Numbers are the same on all ranks, and differ between engines."""
        self._passes.number_passes_from(first)

    def begin_pass(self) -> None:
        """Publish that the next pass has begun."""
        self._passes.begin_pass()

    def record_launches(self, num_launched: int) -> None:
        """Publish how many collectives this rank has launched in the pass."""
        self._passes.record_launches(num_launched)

    def request_divergence(self) -> None:
        """Request that all ranks leave the recorded order in this pass. It reaches every rank whose wait lasts."""
        if self._detector is not None and self._detector.size > 1:
            self._detector.store.write_request(self._passes.progress.pass_number)

    @property
    def divergence_requested(self) -> bool:
        """Whether another rank has requested to leave the order in this pass, and this rank has not done so."""
        return self._passes.has_open_request

    def answer_request(self) -> None:
        """Ignore requests for the rest of the pass, because this rank has left the recorded order."""
        self._passes.answer_request()

    def furthest_progress(self) -> int:
        """Return the largest number of launches in this pass among ranks that wait and have seen the request.

        Other ranks are left out: they may launch more, and where ranks diverge must not depend on which is faster.
        """
        if self._detector is None:
            return 0
        current = self._passes.progress.pass_number
        notes = self._detector.store.read_notes(alive=False).values()
        return max((note.progress for note in notes if note.pass_number == current and note.saw_request), default=0)
