"""The states of random number generators: Python's, numpy's global one, torch's on the CPU and on this rank's GPU."""

from __future__ import annotations

import importlib
import math
import random
import sys
from typing import Any

import torch


def capture_random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of all generators as plain data and tensors. This takes about 0.15 ms, mostly for numpy."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:  # without the import, the generator has not been used
        state["numpy"] = dict(numpy_random.get_state(legacy=False))
    if device.type == "cuda" and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def check_random_states(state: Any, device: torch.device) -> None:
    """Raise unless all captured states can be restored here. Change nothing."""
    if not isinstance(state, dict) or not {"python", "torch"} <= state.keys() <= {"python", "torch", "numpy", "cuda"}:
        raise ValueError("the random state must have python and torch, and may have numpy and cuda")
    for name in state.keys() - (set() if _has_cuda(state, device) else {"cuda"}):
        try:
            _try_random_state(name, state[name], device)
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RuntimeError) as error:
            raise ValueError(f"the saved random state of {name} cannot be restored: {error}") from error


def restore_random_states(state: dict[str, Any], device: torch.device) -> None:
    """Set all generators to captured states after checking them. Skip the state of a GPU if there is no GPU."""
    check_random_states(state, device)
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        importlib.import_module("numpy.random").set_state(state["numpy"])
    if _has_cuda(state, device):
        torch.cuda.set_rng_state(state["cuda"], device)


def _has_cuda(state: dict[str, Any], device: torch.device) -> bool:
    return device.type == "cuda" and "cuda" in state


def _try_random_state(name: str, saved: Any, device: torch.device) -> None:
    """Try a saved state on a temporary generator."""
    if name == "python":
        random.Random().setstate(saved)
        # The generator does not check these values.
        if not all(type(word) is int for word in saved[1]) or not (saved[2] is None or _is_finite(saved[2])):
            raise ValueError("its words are not integers, or its next normal number is not a number")
    elif name == "numpy":
        numpy_random = importlib.import_module("numpy.random")
        kind = type(numpy_random.get_bit_generator())
        if not isinstance(saved, dict) or saved["bit_generator"] != kind.__name__:
            raise ValueError(f"it is not a state of {kind.__name__}, which this process uses")
        if kind is numpy_random.MT19937:  # numpy does not check these values, and would read out of bounds
            key, position, has_next = saved["state"]["key"], saved["state"]["pos"], saved["has_gauss"]
            if key.shape != (624,) or type(position) is not int or not 0 <= position <= 624:
                raise ValueError(f"position {position} is outside its words of shape {key.shape}")
            if type(has_next) is not int or has_next not in (0, 1) or not _is_finite(saved["gauss"]):
                raise ValueError("its next normal number is not a number")
        numpy_random.RandomState(kind(0)).set_state(saved)
    else:
        generator = torch.Generator(device if name == "cuda" else "cpu")
        fresh = generator.get_state()
        if not isinstance(saved, torch.Tensor) or (saved.dtype, saved.shape) != (fresh.dtype, fresh.shape):
            raise ValueError(f"it is not a tensor of {fresh.numel()} bytes")
        generator.set_state(saved)


def _is_finite(number: Any) -> bool:
    return isinstance(number, float) and math.isfinite(number)
