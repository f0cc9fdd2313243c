"""The secret of a job, and the signatures of the messages that its processes exchange through a store.

[Note: signed messages]
The store of a job is a server to which every process on the job's network can connect. Messages in it decide when a
rank saves, where it writes, and whether it ends. Each message is therefore signed: an HMAC-SHA256 over its key and its
content, with a secret that only the processes of the job have. A message with another signature is refused. Because
the key is signed too, a message cannot be copied to another key.

`onefold launch` makes a secret for a job on one node. For several nodes the user gives all of them the same one, in
`ONEFOLD_JOB_SECRET` or in the file that `ONEFOLD_JOB_SECRET_FILE` names. Ranks find a secret that is derived from it
for one start, so that messages of an earlier start are refused as well. Without a secret, messages are marked as not
signed, and a rank that has a secret refuses them.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field

JOB_SECRET, JOB_SECRET_FILE = "ONEFOLD_JOB_SECRET", "ONEFOLD_JOB_SECRET_FILE"
_SHORTEST, _MOST_BYTES = 16, 4096
_NOT_SIGNED = b"not signed:"
_NUM_DIGITS = 64


class JobSecretError(ValueError):
    """The secret of the job cannot be used. The message names the variable, the problem and the fix."""


class ForgedMessageError(RuntimeError):
    """A message in the store does not have the signature of this job."""


@dataclass(frozen=True)
class JobSecret:
    """The secret of a job, or none, in which case messages are not signed."""

    text: str | None = field(repr=False)

    @staticmethod
    def make() -> JobSecret:
        """Return a new random secret."""
        return JobSecret(secrets.token_hex(32))

    @staticmethod
    def find(environment: Mapping[str, str]) -> JobSecret:
        """Return the secret that the environment contains or names the file of."""
        if JOB_SECRET in environment:
            return JobSecret(_checked(environment[JOB_SECRET], JOB_SECRET))
        if path := environment.get(JOB_SECRET_FILE):
            return JobSecret(_checked(_read_private(path), f"{JOB_SECRET_FILE} = {path}"))
        return JobSecret(None)

    def __bool__(self) -> bool:
        return self.text is not None

    def derive(self, purpose: str) -> JobSecret:
        """Return a secret for one purpose, from which this one cannot be computed."""
        return self if self.text is None else JobSecret(self._digest(f"derived for {purpose}", b""))

    def sign(self, key: str, content: bytes) -> bytes:
        """Return the message that is stored under a key."""
        return _NOT_SIGNED + content if self.text is None else self._digest(key, content).encode() + content

    def verify(self, key: str, message: bytes) -> bytes:
        """Return the content of the message under a key. Raise `ForgedMessageError` if its signature is wrong."""
        is_signed = not message.startswith(_NOT_SIGNED)
        if self.text is None:
            if is_signed:
                raise ForgedMessageError(
                    f"the message {key!r} in the store is refused: it is signed, or not of onefold, and {JOB_SECRET} "
                    "is not set here. Set it to the same value on all nodes."
                )
            return message.removeprefix(_NOT_SIGNED)
        signature, content = message[:_NUM_DIGITS], message[_NUM_DIGITS:]
        if not hmac.compare_digest(signature, self._digest(key, content).encode()):
            reason = "its signature is wrong" if is_signed else "it is not signed"
            raise ForgedMessageError(
                f"the message {key!r} in the store is refused: {reason}. Set {JOB_SECRET} to the same value on all "
                "nodes. If it is, another process writes to this store."
            )
        return content

    def _digest(self, key: str, content: bytes) -> str:
        assert self.text is not None
        return hmac.new(self.text.encode(), key.encode() + b"\0" + content, "sha256").hexdigest()


def _checked(text: str, source: str) -> str:
    text = text.strip()
    if len(text) < _SHORTEST:
        raise JobSecretError(
            f"{source}: the secret of the job has {len(text)} characters, but needs at least {_SHORTEST}. Make one "
            "with `openssl rand -hex 32`."
        )
    return text


def _read_private(path: str) -> str:
    """Return the text of a file that only this user, or root, can read and write."""
    source = f"{JOB_SECRET_FILE} = {path}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", path)
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise JobSecretError(f"{source}: cannot be read ({error.strerror}). Name a file with a secret.") from None
    if status.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(status.st_mode) & 0o077:
        raise JobSecretError(
            f"{source}: other users can read or write it (mode {stat.S_IMODE(status.st_mode):04o}). Make it yours, "
            f"then run `chmod 600 {path}`."
        )
    if len(text) > _MOST_BYTES or not text.isascii():
        raise JobSecretError(f"{source}: not a line of text with a secret. Make one with `openssl rand -hex 32`.")
    return text.decode("ascii")
