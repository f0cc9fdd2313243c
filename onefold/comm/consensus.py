"""Ranks compare what must be equal on all of them before anything collective can hang on it, or mix it up.

[Note: agreeing without a collective]
A rank that is made differently, or never comes, must not be met in a collective: sizes would not fit, or fit by
accident. Each rank counts itself in the store, under the digest of its own description; when all have come, one more
look says whether all hold the same digest. Only where they do not does the first holder of each digest post its
description, and every rank raises the same error, with the first difference. A round's keys are removed in the next.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Mapping, Sequence

from onefold.comm.agreement import Agreement
from onefold.comm.mesh import timeout_of
from onefold.comm.wait_notes import name_ranks
from onefold.comm.watch import Disagreement, Watch, watch_world
from onefold.log import logger

# A rank that has not come is named in a warning after this long; the error comes at the process group's timeout.
WARN_SECONDS = 60.0
TIMEOUT_SECONDS: float | None = None
_SHORTEST, _LONGEST = 0.0001, 0.05
_ADVICE = "Every rank must build the same model, with the same config and optimizer"

Item = tuple[str, Mapping[str, str]]
"""Something all ranks must have alike: its name, and its facts."""


def assert_same_on_all_ranks(what: str, items: Sequence[Item], advice: str = _ADVICE) -> None:
    """Return once every rank has come to `what` with the same items in the same order; else raise on all of them."""
    watch = watch_world()
    if watch.size > 1:
        watch.rounds += 1
        _Round(watch, what, items, advice).run()


def assert_same_by_exchange(agreement: Agreement, what: str, items: Sequence[Item], advice: str = _ADVICE) -> None:
    """The same where all ranks are sure to come: one small exchange, unless they differ."""
    if agreement.group.size > 1:
        digest = int.from_bytes(_digest(_text(items))[:8], "big", signed=True)
        if len({row[0] for row in agreement.meet(what, [digest])}) > 1:
            assert_same_on_all_ranks(what, items, advice)


class _Round:
    def __init__(self, watch: Watch, what: str, items: Sequence[Item], advice: str) -> None:
        self._watch, self._store = watch, watch.store
        self._what, self._items, self._advice = what, items, advice
        self._mine = _digest(_text(items)).hex()

    def run(self) -> None:
        watch, store = self._watch, self._store
        with watch.waiting(self._what):
            store.set(self._key("rank", watch.rank), self._mine)
            store.add(self._key("digest", self._mine), 1)
            store.add(self._key("come"), 1)
            self._await_all()
            alike = store.add(self._key("digest", self._mine), 0) == watch.size
            self._forget(watch.rounds - 1)
            if not alike:
                raise Disagreement(self._name_difference())

    def _await_all(self) -> None:
        started, pause, warned = time.monotonic(), _SHORTEST, False
        limit = TIMEOUT_SECONDS if TIMEOUT_SECONDS is not None else timeout_of(self._watch.world).total_seconds()
        look = started + 1.0
        while self._store.add(self._key("come"), 0) < self._watch.size:
            self._watch.check()
            now = time.monotonic()
            if now > look:
                look = now + 1.0
                missing = self._missing()
                gone = [rank for rank in missing if self._watch.has_left(rank)]
                if gone:
                    raise Disagreement(f"{self._what}: {name_ranks(gone)} ended before coming to it")
                if now - started > WARN_SECONDS and missing and not warned:
                    warned = True
                    logger.warning(
                        "%s: rank %d has waited %.0f s for %s, which has not come to it; the wait ends after %.0f s",
                        self._what, self._watch.rank, now - started, name_ranks(missing), limit,
                    )  # fmt: skip
            if now - started > limit and (missing := self._missing()):
                raise Disagreement(
                    f"{self._what}: {name_ranks(missing)} did not come to it within {limit:.0f} s, the timeout of the "
                    "process group: every rank must make the same engines, in the same order"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._watch.size) if not self._store.check([self._key("rank", rank)])]

    def _name_difference(self) -> str:
        """The same on every rank."""
        store, watch = self._store, self._watch
        digests = [store.get(self._key("rank", rank)).decode() for rank in range(watch.size)]
        if digests.index(self._mine) == watch.rank:
            store.set(self._key("text", watch.rank), zlib.compress(_text(self._items), 1))
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        texts = [store.get(self._key("text", rank)) for rank in (0, other)]  # waits until they are there
        first, second = (json.loads(zlib.decompress(text)) for text in texts)
        differing = [rank for rank, digest in enumerate(digests) if digest == digests[other]]
        verb = "differs" if len(differing) == 1 else "differ"
        return (
            f"{self._what}: {name_ranks(differing)} {verb} from rank 0: {first_difference(first, second)}. "
            f"{self._advice}"
        )

    def _forget(self, number: int) -> None:
        """All ranks have left the round before this one."""
        keys = [self._key("rank", self._watch.rank, number=number), self._key("text", self._watch.rank, number=number)]
        if self._watch.rank == 0:
            keys += [self._key("come", number=number), self._key("digest", self._watch.agreed, number=number)]
        for key in keys:
            self._store.delete_key(key)
        self._watch.agreed = self._mine

    def _key(self, *words: object, number: int | None = None) -> str:
        return self._watch.key("alike", self._watch.rounds if number is None else number, *words)


def first_difference(first: Sequence[Item], other: Sequence[Item]) -> str:
    """In words, from the other's side."""
    names, other_names = [name for name, _ in first], [name for name, _ in other]
    for place, (name, facts) in enumerate(other):
        if place >= len(first) or (name != names[place] and name not in names):
            return f"it has {name}, which rank 0 has not"
        if name != names[place]:
            if names[place] not in other_names:
                return f"it has no {names[place]}, rank 0 has"
            return f"another order: {name} stands where rank 0 has {names[place]}"
        theirs = first[place][1]
        for fact in [*facts, *(fact for fact in theirs if fact not in facts)]:
            if facts.get(fact) != theirs.get(fact):
                mine, rank0s = facts.get(fact, "nothing"), theirs.get(fact, "nothing")
                return f"{name} has {fact} {mine}, rank 0's {rank0s}"
    return f"it has no {names[len(other)]}, rank 0 has"


def _text(items: Sequence[Item]) -> bytes:
    return json.dumps([[name, dict(facts)] for name, facts in items]).encode()


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()
