"""Removal of secrets from texts that are logged, printed or written to files.

The values of environment variables whose names are those of secrets, and credentials in URLs, are replaced by `***`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping

HIDDEN = "***"
# Shorter values are switches and numbers, and would be replaced in unrelated words.
_SHORTEST = 8
_SECRET_WORDS = {
    "APIKEY", "AUTH", "COOKIE", "CREDENTIAL", "CREDENTIALS", "CREDS", "DSN", "KEY", "KEYS", "PASS", "PASSPHRASE",
    "PASSWD", "PASSWORD", "PASSWORDS", "PAT", "PW", "PWD", "SECRET", "SECRETS", "TOKEN", "TOKENS",
}  # fmt: skip
_SECRET_ENDS = ("APIKEY", "CREDENTIALS", "PASSWORD", "SECRET", "TOKEN")
# Variables with the place of a secret, or of the current folder.
_PLACES = re.compile(r"(_(FILE|PATH|DIR|FOLDER|HOME|SOCK|SOCKET)|^(OLD)?PWD)$")
URL_CREDENTIALS = re.compile(r"(?<=://)[^/?#\s@\"'<>]+@")
_URL_PARAMETER = re.compile(
    r"([?&;][^=&;\s\"']*(?:token|key|secret|signature|password|credential)[^=&;\s\"']*=)[^&;\s\"']+", re.I
)


def is_secret_name(name: str) -> bool:
    """Return whether a variable or a key with this name holds a secret."""
    upper = name.upper()
    if _PLACES.search(upper):
        return False
    words = re.split(r"[^A-Z0-9]+", upper)
    return not _SECRET_WORDS.isdisjoint(words) or any(word.endswith(_SECRET_ENDS) for word in words)


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return a text without the secrets of the environment and without credentials in URLs."""
    values = {
        value.strip()
        for name, value in (os.environ if environment is None else environment).items()
        if len(value.strip()) >= _SHORTEST and is_secret_name(name)
    }
    for value in sorted(values, key=len, reverse=True):  # one may contain another
        text = text.replace(value, HIDDEN)
    return _URL_PARAMETER.sub(rf"\1{HIDDEN}", URL_CREDENTIALS.sub(f"{HIDDEN}@", text))


def redact_command(arguments: list[str]) -> list[str]:
    """Return the arguments of a command without the values of options that have the names of secrets."""
    found: list[str] = []
    hides_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hides_next and not argument.startswith("-"):
            found.append(HIDDEN)
        elif equals and is_secret_name(name.lstrip("-")):
            found.append(f"{name}={HIDDEN}")
        else:
            found.append(redact(argument))
        hides_next = argument.startswith("-") and not equals and is_secret_name(argument.lstrip("-"))
    return found


class RedactingFilter(logging.Filter):
    """Removes secrets from the records of a logger, and from their tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        redacted = redact(text)
        if redacted != text:
            record.msg, record.args = redacted, None
        if record.exc_info and not record.exc_text:
            record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
        return True
