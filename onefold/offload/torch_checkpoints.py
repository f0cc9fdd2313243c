"""Host storage of the inputs of torch's checkpoints, in forwards of one engine's model.

[Note: torch's checkpoints]
transformers and models of users hold `torch.utils.checkpoint.checkpoint` itself, so that replacing the function in its
module would reach none of them. It looks up both of its ways in its module: `CheckpointFunction` (reentrant) and the
generator that runs before and after the other one. These two are replaced while an engine with host checkpoints is
open. Outside of forwards of such a model they do what they did. A checkpoint inside another one stores nothing, because
the outer one recomputes its inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.utils.checkpoint as library
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from onefold.config import ConfigError
from onefold.log import logger
from onefold.offload.activation_offload import HostCopies, Inputs, OffloadedInput, forget_buffers

_KEY = "activation_checkpointing.cpu_checkpointing"
_REENTRANT, _GENERATOR = "CheckpointFunction", "_checkpoint_without_reentrant_generator"

_open: list[HostCheckpoints] = []
"""Those of all open engines."""
_active: list[HostCheckpoints] = []
"""Those whose models are in a forward, the innermost last."""
_originals: dict[str, Any] = {}
_is_own: ContextVar[bool] = ContextVar("onefold_own_checkpoint", default=False)


class HostCheckpoints:
    """The inputs of checkpoints in forwards of a model are stored on the host until `remove`."""

    def __init__(self, model: nn.Module) -> None:
        self.copies = HostCopies()
        self._is_checked = False
        if not _open:
            _install()
        _open.append(self)
        self._handles = [
            model.register_forward_pre_hook(self._begin_forward, prepend=True),
            model.register_forward_hook(self._end_forward, always_call=True),
        ]

    def remove(self) -> None:
        """Restore torch's checkpoints, unless another engine replaces them too."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self in _open:
            _open.remove(self)
            _active[:] = [each for each in _active if each is not self]
            if not _open:
                for name, own in _OWN.items():
                    if getattr(library, name) is own:
                        setattr(library, name, _originals[name])
                _originals.clear()
                forget_buffers()

    def _begin_forward(self, *_: Any) -> None:
        _active.append(self)

    def _end_forward(self, model: nn.Module, arguments: Any, output: Any) -> None:
        if self in _active:
            _active.reverse()
            _active.remove(self)
            _active.reverse()
        if output is not None and model.training and torch.is_grad_enabled() and not self._is_checked:
            self._is_checked = True
            if not self.copies.num_calls:
                logger.warning(
                    "%s has no effect: the first forward of %s called no checkpoint. Enable gradient checkpointing "
                    "(gradient_checkpointing_enable() in transformers), or leave the key out.",
                    _KEY,
                    type(model).__name__,
                )


def current_copies() -> HostCopies | None:
    """Return the counts of the model that is in a forward, if its engine has host checkpoints."""
    return _active[-1].copies if _active else None


@contextmanager
def own_checkpoint() -> Iterator[None]:
    """Leave checkpoints in this context alone, because `onefold.checkpointing` stores their inputs itself."""
    token = _is_own.set(True)
    try:
        yield
    finally:
        _is_own.reset(token)


def _install() -> None:
    missing = [name for name in (_REENTRANT, _GENERATOR) if not hasattr(library, name)]
    if missing:
        raise ConfigError(
            f"{_KEY}: torch {torch.__version__} has no torch.utils.checkpoint.{missing[0]}, so its checkpoints cannot "
            "be stored on the host. Leave the key out, or use a version of torch that onefold supports."
        )
    for name, own in _OWN.items():
        _originals[name] = getattr(library, name)
        setattr(library, name, own)


def _inputs_of(values: tuple[Any, ...]) -> Inputs | None:
    """Return the storage of a checkpoint's inputs, or None if they are not stored on the host."""
    if not _active or _is_own.get() or not torch.is_grad_enabled():
        return None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]
    if hooks is not None and hooks[0].__module__ == library.__name__:
        return None
    return Inputs(values, on_host=True, num_slots=None, copies=_active[-1].copies)


def _without_reentrant(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Run before and after the function of a non-reentrant checkpoint."""
    inputs, generator = _inputs_of(args), _originals[_GENERATOR](*args, **kwargs)
    if inputs is None:
        yield from generator
        return
    with saved_tensors_hooks(inputs.pack, OffloadedInput.back):
        yield from generator
    inputs.wait_for_copies()


class _HostCheckpointFunction:
    """The reentrant checkpoint, under the name of torch's function."""

    @staticmethod
    def apply(function: Any, preserve: Any, *args: Any) -> Any:
        """Call the function without a graph, and save its inputs."""
        original, inputs = _originals[_REENTRANT], _inputs_of(args)
        if inputs is None:
            return original.apply(function, preserve, *args)
        if any(isinstance(value, torch.Tensor) and value.requires_grad for value in args):
            inputs.start(args)  # torch saves them after the function
        with saved_tensors_hooks(inputs.pack, OffloadedInput.back):
            outputs = original.apply(function, preserve, *args)
        inputs.wait_for_copies()
        return outputs


_OWN = {_REENTRANT: _HostCheckpointFunction, _GENERATOR: _without_reentrant}
