"""A config without what its owner would not show: checkpoints are passed on, and lie about for years."""

from __future__ import annotations

import re
from typing import Any

NOT_STORED = "(not stored)"
# Spelt with underscores, hyphens, capitals or nothing between words. A tokenizer is no secret.
_SECRET = re.compile(r"apikey|accesskey|privatekey|token(?!iz)|passw|passphrase|secret|credential")
# Of a URL, who may use it.
_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def without_secrets(tree: Any) -> Any:
    """The same, with `(not stored)` for whatever stands under a key that names a secret. Numbers and switches stay."""
    if isinstance(tree, dict):
        return {key: _hidden(value) if _names_secret(key) else without_secrets(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(without_secrets(value) for value in tree)
    return _USER.sub(NOT_STORED, tree) if isinstance(tree, str) else tree


def _names_secret(key: Any) -> bool:
    return isinstance(key, str) and _SECRET.search(re.sub(r"[-_ .]", "", key.lower())) is not None


def _hidden(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float) else NOT_STORED
