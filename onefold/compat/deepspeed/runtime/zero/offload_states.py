"""Where the states of an engine are."""

from __future__ import annotations

from typing import Any

import torch

from onefold.engine.offloaded_states import OffloadStateTypeEnum


def get_state_devices(model: Any, state: OffloadStateTypeEnum) -> set[torch.device]:
    """Return the devices that hold the states of one kind; none if there are no such states."""
    found: set[torch.device] = model.offloaded_states.devices_of(state)
    return found
