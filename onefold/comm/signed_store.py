"""Signed messages in the store of the process group ([Note: signed messages] in `job_secret.py`).

All keys of onefold in the store are read and written here. Counters (`add`) and the absence of a key cannot be signed:
another process that can connect to the store can stop a job, but not make it read a forged message.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from onefold.job_secret import ForgedMessageError, JobSecret
from onefold.log import logger


class SignedStore:
    """The messages of one process in a store. Any thread may use it."""

    def __init__(self, connection: Any, secret: JobSecret | None = None) -> None:
        self._connection = connection
        self._secret = JobSecret.find(os.environ) if secret is None else secret
        self._refused: set[str] = set()
        self._mutex = threading.Lock()

    @staticmethod
    def of_job(*, alone: bool = False, separate: bool = False) -> SignedStore:
        """Return the store of the default process group, or one of this process for a rank that is alone.

        With `separate` it has another connection, so that a call that blocks on the first does not block it.
        """
        if alone:
            return SignedStore(HashStore())
        default: Any = dist.distributed_c10d._get_default_store()
        return SignedStore(default.clone() if separate else default)

    @property
    def fingerprint(self) -> bytes:
        """Bytes that are the same in all processes with the same secret, and from which it cannot be computed."""
        return (self._secret.derive("comparisons").text or "").encode()

    def set(self, key: str, content: str | bytes) -> None:
        """Write a message, and replace an earlier one."""
        self._connection.set(key, self._secret.sign(key, _as_bytes(content)))

    def set_once(self, key: str, content: str | bytes) -> bytes:
        """Write a message unless there is one. Return the content of the one that is in the store.

        A refused message in the store cannot be replaced. Then the content is returned that could not be written.
        """
        message = self._connection.compare_set(key, "", self._secret.sign(key, _as_bytes(content)))
        found = self._verified(key, message)
        return _as_bytes(content) if found is None else found

    def find(self, key: str) -> bytes | None:
        """Return the content of a message, or None if there is none or it is refused. A refusal is logged once."""
        return self._verified(key, self._connection.get(key)) if self.has(key) else None

    def get(self, key: str) -> bytes:
        """Wait for a message and return its content. Raise `ForgedMessageError` if it is refused."""
        return self._secret.verify(key, self._connection.get(key))

    def has(self, key: str) -> bool:
        """Return whether there is a value under this key, which may be one that is refused."""
        return bool(self._connection.check([key]))

    def add(self, key: str, number: int) -> int:
        """Add to a counter, which is not signed, and return it."""
        return int(self._connection.add(key, number))

    def remove(self, key: str) -> None:
        """Remove a message or a counter."""
        self._connection.delete_key(key)

    def _verified(self, key: str, message: bytes) -> bytes | None:
        try:
            return self._secret.verify(key, message)
        except ForgedMessageError as error:
            with self._mutex:
                is_new = key not in self._refused
                self._refused.add(key)
            if is_new:
                logger.warning("%s", error)
            return None


def _as_bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content
