"""Checks that ranks are set up the same, before a collective could hang on a difference or mix up data.

[Note: agreeing without a collective]
A rank that is set up differently, or never comes, must not take part in a collective: sizes would not match, or match
by accident. Each rank counts itself in the store of the process group, under the digest of its own description. When
all ranks have come, one more read shows whether all have the same digest. Only if they do not, the first rank of each
digest sends its description, and every rank raises the same error with the first difference. The keys of a
comparison are removed in the next one.
"""

from __future__ import annotations

import hashlib
import json
import time
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onefold.comm.agreement import Agreement
from onefold.comm.guard import Disagreement
from onefold.comm.hang_detector import HangDetector, world_detector
from onefold.comm.mesh import timeout_of
from onefold.comm.wait_notes import name_ranks
from onefold.log import logger

# A missing rank is named in a warning after this long; the error is raised at the process group's timeout.
WARN_SECONDS = 60.0
TIMEOUT_SECONDS: float | None = None
_SHORTEST, _LONGEST = 0.0001, 0.05
_MOST_BYTES = 1 << 28
_ADVICE = "Build the same model, with the same config and optimizer, on every rank"

Item = tuple[str, Mapping[str, str]]
"""Something that must be the same on all ranks: its name, and its facts."""


@dataclass
class _History:
    """The comparisons that the ranks of one process group have made."""

    num_comparisons: int = 0
    last_digest: str = ""


_histories: weakref.WeakKeyDictionary[HangDetector, _History] = weakref.WeakKeyDictionary()


def num_comparisons() -> int:
    """Return how often the ranks of the default process group have called `assert_same_on_all_ranks`."""
    return _histories.setdefault(world_detector(), _History()).num_comparisons


def assert_same_on_all_ranks(what: str, items: Sequence[Item], advice: str = _ADVICE) -> None:
    """Wait until every rank has called this, and raise `Disagreement` on all of them if their items differ.

    `what` names the call in errors. Items must be the same, in the same order.
    """
    detector = world_detector()
    if detector.size > 1:
        history = _histories.setdefault(detector, _History())
        history.num_comparisons += 1
        _Comparison(detector, history, what, items, advice).run()


def assert_same_by_exchange(agreement: Agreement, what: str, items: Sequence[Item], advice: str = _ADVICE) -> None:
    """Like `assert_same_on_all_ranks`, for calls that all ranks are sure to make: one small exchange of digests.

    The full comparison follows only if the digests differ.
    """
    if agreement.group.size > 1:
        digest = int.from_bytes(_digest(_text(items))[:8], "big", signed=True)
        if len({row[0] for row in agreement.synchronize(what, [digest])}) > 1:
            assert_same_on_all_ranks(what, items, advice)


class _Comparison:
    """One comparison of all ranks through the store."""

    def __init__(
        self, detector: HangDetector, history: _History, what: str, items: Sequence[Item], advice: str
    ) -> None:
        self._detector, self._store, self._history = detector, detector.store.connection, history
        self._what, self._items, self._advice = what, items, advice
        # Ranks with different secrets differ, too: they would refuse the messages of each other.
        self._mine = _digest(self._store.fingerprint + _text(items)).hex()

    def run(self) -> None:
        detector, store = self._detector, self._store
        with detector.waiting_for(self._what):
            store.set(self._key("rank", detector.rank), self._mine)
            store.add(self._key("digest", self._mine), 1)
            store.add(self._key("come"), 1)
            self._wait_for_all()
            is_same = store.add(self._key("digest", self._mine), 0) == detector.size
            self._remove_previous_keys()
            if not is_same:
                raise Disagreement(self._describe_difference())

    def _wait_for_all(self) -> None:
        """Wait until all ranks have come. Raise if one has ended, or does not come within the timeout."""
        started, pause, warned = time.monotonic(), _SHORTEST, False
        limit = TIMEOUT_SECONDS if TIMEOUT_SECONDS is not None else timeout_of(self._detector.world).total_seconds()
        next_check = started + 1.0
        while self._store.add(self._key("come"), 0) < self._detector.size:
            self._detector.check()
            now = time.monotonic()
            if now > next_check:
                next_check = now + 1.0
                missing = self._missing()
                ended = [rank for rank in missing if self._detector.store.has_ended(rank)]
                if ended:
                    raise Disagreement(
                        f"{self._what}: {name_ranks(ended)} ended before reaching it. Check the end of its log."
                    )
                if now - started > WARN_SECONDS and missing and not warned:
                    warned = True
                    logger.warning(
                        "%s: rank %d has waited %.0f s for %s. The wait ends after %.0f s",
                        self._what, self._detector.rank, now - started, name_ranks(missing), limit,
                    )  # fmt: skip
            if now - started > limit and (missing := self._missing()):
                raise Disagreement(
                    f"{self._what}: {name_ranks(missing)} did not reach it within {limit:.0f} s, the timeout of the "
                    "process group. Create the same engines, in the same order, on every rank."
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._detector.size) if not self._store.has(self._key("rank", rank))]

    def _describe_difference(self) -> str:
        """Return an error message with the first difference. It is the same on every rank."""
        store, rank = self._store, self._detector.rank
        digests = [store.get(self._key("rank", other)).decode() for other in range(self._detector.size)]
        if digests.index(self._mine) == rank:
            store.set(self._key("text", rank), zlib.compress(_text(self._items), 1))
        other = next(number for number, digest in enumerate(digests) if digest != digests[0])
        texts = [store.get(self._key("text", number)) for number in (0, other)]  # waits until they are written
        first, second = (json.loads(_decompress(text)) for text in texts)
        differing = [number for number, digest in enumerate(digests) if digest == digests[other]]
        verb = "differs" if len(differing) == 1 else "differ"
        return (
            f"{self._what}: {name_ranks(differing)} {verb} from rank 0: {first_difference(first, second)}. "
            f"{self._advice}"
        )

    def _remove_previous_keys(self) -> None:
        """Remove the keys of the previous comparison, which all ranks have finished."""
        rank, number = self._detector.rank, self._history.num_comparisons - 1
        keys = [self._key("rank", rank, number=number), self._key("text", rank, number=number)]
        if rank == 0:
            keys += [self._key("come", number=number), self._key("digest", self._history.last_digest, number=number)]
        for key in keys:
            self._store.remove(key)
        self._history.last_digest = self._mine

    def _key(self, *words: object, number: int | None = None) -> str:
        return self._detector.store.key("same", self._history.num_comparisons if number is None else number, *words)


def first_difference(first: Sequence[Item], other: Sequence[Item]) -> str:
    """Return how `other` differs from the items of rank 0, as a clause for an error message."""
    names, other_names = [name for name, _ in first], [name for name, _ in other]
    for place, (name, facts) in enumerate(other):
        if place >= len(first) or (name != names[place] and name not in names):
            return f"it has {name}, but rank 0 does not"
        if name != names[place]:
            if names[place] not in other_names:
                return f"it has no {names[place]}, but rank 0 does"
            return f"different order: it has {name} where rank 0 has {names[place]}"
        theirs = first[place][1]
        for fact in [*facts, *(fact for fact in theirs if fact not in facts)]:
            if facts.get(fact) != theirs.get(fact):
                mine, rank0s = facts.get(fact, "nothing"), theirs.get(fact, "nothing")
                return f"{name} has {fact} {mine}, rank 0's {rank0s}"
    return f"it has no {names[len(other)]}, but rank 0 does"


def _text(items: Sequence[Item]) -> bytes:
    return json.dumps([[name, dict(facts)] for name, facts in items]).encode()


def _decompress(text: bytes) -> bytes:
    reader = zlib.decompressobj()
    found = reader.decompress(text, _MOST_BYTES)
    if reader.unconsumed_tail:
        raise Disagreement(f"a description of a rank in the store has more than {_MOST_BYTES} bytes")
    return found


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()
