"""Machines with an accelerator on which onefold does not compute: the log says so."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
import torch
from models import config, net, start


def messages_with(kind: str | None) -> list[str]:
    """Start an engine on a machine whose accelerator is said to be of a type, and return its warnings."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    device = None if kind is None else torch.device(kind)
    logging.getLogger("onefold").addHandler(handler)
    try:
        with mock.patch.object(torch.accelerator, "current_accelerator", return_value=device):
            engine = start(net(), config(1))
        assert engine.device.type == "cpu"
        engine.destroy()
    finally:
        logging.getLogger("onefold").removeHandler(handler)
    return [message for message in found if "is not used" in message]


@pytest.mark.parametrize("kind", ["xpu", "mps", "npu", None])
def test_an_unused_device_is_named(on_ranks, kind):
    if kind == "npu":
        kind = "privateuseone"  # as torch calls devices of other vendors
    first, second = on_ranks(2, messages_with, kind)
    assert second == []
    assert first == [] if kind is None else f"the device {kind} of this machine is not used" in first[0]
