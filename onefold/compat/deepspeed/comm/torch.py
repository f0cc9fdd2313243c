"""What DeepSpeed's backend over torch.distributed knows of the world before it starts."""

from __future__ import annotations

import os

from onefold.compat.not_offered import NotOffered


class TorchBackend(NotOffered):
    what = "a backend around torch.distributed (its functions are called directly)"


def known_world_size(world_size: int | None) -> int | None:
    """Return the world size that was given or that the launcher set, or None if only `init_method` determines it."""
    if world_size is not None and world_size > 0:
        return world_size
    told = os.environ.get("WORLD_SIZE", "")
    return int(told) if told.isdigit() and int(told) > 0 else None
