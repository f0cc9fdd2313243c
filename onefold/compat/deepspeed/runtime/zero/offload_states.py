"""Where the states of an engine are."""

from __future__ import annotations

from typing import Any

import torch

from onefold.engine.offloaded_states import OffloadStateTypeEnum, devices_of


def get_state_devices(model: Any, state: OffloadStateTypeEnum) -> set[torch.device]:
    """The devices that hold the states of one kind; none where there are no such states."""
    return devices_of(model.state, state)
