"""What `isinstance(engine.optimizer, FusedAdam)` asks: whether DeepSpeed would have made one of the same config."""

from __future__ import annotations

from typing import Any


class OrOfEngine(type):
    """The class of an optimizer; an engine's optimizer that stands for one counts as its instance too."""

    def __instancecheck__(cls, found: Any) -> bool:
        stands_for = getattr(found, "__dict__", {}).get("stands_for")
        return super().__instancecheck__(found) or (stands_for is not None and issubclass(stands_for, cls))
