"""Classes that stand for parts of DeepSpeed other than ZeRO: they can be imported and inherited from, but not used."""

from __future__ import annotations

from typing import Any


class NotOfferedError(NotImplementedError, AttributeError):
    """Using a name that is not offered. `hasattr` and `getattr` with a default see that the attribute is missing."""


class _Explained(type):
    """The class of names that are not offered: their attributes are not offered either."""

    what: str

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        raise NotOfferedError(explain(f"{cls.__name__}.{name}", cls.what))


class NotOffered(metaclass=_Explained):
    """A class that raises when it is instantiated or called, or when an attribute is read."""

    what = "this part of DeepSpeed"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotOfferedError(explain(type(self).__name__, self.what))


def explain(name: str, what: str) -> str:
    """Return the message for the use of a name that is not offered."""
    return f"{name}: onefold does not support {what}. Run scripts that need it with DeepSpeed itself."


_made: dict[tuple[str, str], type] = {}


def class_of(name: str, what: str, module: str) -> type:
    """Return the class that stands for a name; the same class in every module that has the name."""
    if (name, what) not in _made:
        bases = (NotOffered, Exception) if name.endswith("Error") else (NotOffered,)
        _made[name, what] = _Explained(name, bases, {"what": what, "__module__": module})
    return _made[name, what]
