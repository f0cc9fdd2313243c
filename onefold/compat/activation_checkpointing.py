"""onefold's activation checkpointing under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from onefold import checkpointing
from onefold.checkpointing import is_configured, partition_activations_in_checkpoint, reset, set_num_layers
from onefold.compat.accelerator import get_accelerator
from onefold.compat.config import read_config
from onefold.runtime.chunked_call import ChunkedCall

__all__ = [
    "CudaRNGStatesTracker", "checkpoint", "configure", "detach_variable", "get_cuda_rng_tracker", "is_configured",
    "model_parallel_cuda_manual_seed", "model_parallel_reconfigure_tp_seed", "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint", "reset", "set_num_layers",
]  # fmt: skip

_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
_SEED_OFFSET = 2718


class CudaRNGStatesTracker:
    """Random states of the device by name. `checkpoint` replays them in a recomputation."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Track the state that a seed gives, without a change to the current one."""
        if seed in self.seeds_:
            raise ValueError(f"seed {seed} is already tracked")
        if name in self.states_:
            raise ValueError(f"random state {name!r} is already tracked")
        device = get_accelerator()
        before = device.get_rng_state()
        device.manual_seed(seed)
        self.states_[name] = device.get_rng_state()
        self.seeds_.add(seed)
        device.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Draw random numbers from a tracked state inside the context."""
        if name not in self.states_:
            raise ValueError(f"random state {name!r} is not tracked. Call add(name, seed) first.")
        device = get_accelerator()
        before = device.get_rng_state()
        device.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = device.get_rng_state()
            device.set_rng_state(before)


_CUDA_RNG_STATE_TRACKER = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    return _CUDA_RNG_STATE_TRACKER


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device and track a second state, for regions that a tensor-parallel model would seed by rank."""
    _CUDA_RNG_STATE_TRACKER.reset()
    get_accelerator().manual_seed(seed)
    _CUDA_RNG_STATE_TRACKER.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, seed + _SEED_OFFSET)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    with _CUDA_RNG_STATE_TRACKER.fork():
        get_accelerator().manual_seed(seed + _SEED_OFFSET)


def configure(mpu_: Any = None, deepspeed_config: Any = None, *args: Any, **kwargs: Any) -> None:
    """Set what later calls of `checkpoint` do, by a config and by arguments as `onefold.checkpointing.configure`."""
    config = None if deepspeed_config is None else read_config(deepspeed_config)
    checkpointing.configure(mpu_, config, *args, **kwargs)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute `function(*args, **kwargs)` again in backward instead of keeping its activations."""
    return checkpointing.checkpoint(
        _Replayed(function) if _CUDA_RNG_STATE_TRACKER.states_ else function, *args, **kwargs
    )


non_reentrant_checkpoint = checkpoint


class _Replayed:
    """Return a function whose later calls draw the random numbers of its first call from the tracked states."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._states: dict[str, torch.Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        now = _CUDA_RNG_STATE_TRACKER.get_states()
        if self._states is None:
            self._states = now
            return self._function(*args, **kwargs)
        _CUDA_RNG_STATE_TRACKER.set_states(dict(self._states))
        try:
            return self._function(*args, **kwargs)
        finally:
            _CUDA_RNG_STATE_TRACKER.set_states(now)


def detach_variable(inputs: tuple[Any, ...], device: Any = None) -> tuple[Any, ...]:
    """Return the inputs with every tensor detached from its graph; each requires a gradient as before."""
    if not isinstance(inputs, tuple):
        raise RuntimeError(f"detach_variable expects a tuple of tensors, not {type(inputs).__name__}")
    return tuple(_detached(value, device) if isinstance(value, torch.Tensor) else value for value in inputs)


def _detached(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    found = (tensor if device is None else tensor.to(device)).detach()
    return found.requires_grad_(tensor.requires_grad)


class TiledMLP:
    """A layer that works on a part of the sequence at a time: its activations are computed again for each part."""

    @staticmethod
    def apply(fn: Callable[[Any, Any], Any], module: Any, x: Any, shards: int, compute_params: Any = None) -> Any:
        """Return `fn(module, x)` for a function of each position, in parts of `x` along its second dimension."""

        def by_position(part: Any) -> Any:
            return fn(module, part.transpose(0, 1)).transpose(0, 1)

        positions = x.transpose(0, 1)
        found = ChunkedCall("TiledMLP", by_position, (positions,), {}).run(shards, [positions], [*module.parameters()])
        return found.transpose(0, 1)


class SequenceTiledCompute:
    """A function of parts of the sequence, whose activations are computed again for each part."""

    @staticmethod
    def apply(
        fn: Callable[..., Any],
        seqlen: int,
        shards: int,
        kwargs_to_shard: dict[str, Any],
        kwargs_to_pass: dict[str, Any],
        grad_requiring_tensor_key: str,
        compute_params: Any = None,
        output_unshard_dimension: int = 1,
        output_reduction: str | None = "mean",
    ) -> Any:
        """Return `fn` of tensors that are divided into `shards` parts along their second dimension.

        A part returns a value of each token, or a scalar. Scalars are reduced ("mean" or "sum" over the parts).
        """
        names = [*kwargs_to_shard]
        inputs = tuple(kwargs_to_shard[name].transpose(0, 1) for name in names)
        if output_reduction not in (None, "mean", "sum") or any(len(each) != seqlen for each in inputs):
            raise ValueError(
                f"sequence_tiled_compute: output_reduction is {output_reduction!r}, and tensors have "
                f"{[len(each) for each in inputs]} tokens. Pass None, mean or sum, and tensors of {seqlen} tokens."
            )

        def of_part(*parts: Any) -> Any:
            given = {name: part.transpose(0, 1) for name, part in zip(names, parts, strict=True)}
            found = fn(**given, **kwargs_to_pass)
            if output_reduction is None:
                return found.transpose(0, output_unshard_dimension)
            return (found / len(parts[0])).expand(len(parts[0]))  # of each token, so that parts can be joined

        call = ChunkedCall("sequence_tiled_compute", of_part, inputs, {})
        found = call.run(shards, inputs, list(compute_params or ()))
        if output_reduction is None:
            return found.transpose(0, output_unshard_dimension)
        return found.sum() / (min(shards, seqlen) if output_reduction == "mean" else 1)


sequence_tiled_compute = SequenceTiledCompute.apply
