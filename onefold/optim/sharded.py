"""The optimizer object that `initialize` returns: the user's parameter groups over flat shards."""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

import torch

from onefold.optim.instance import FORWARD_MARK, FORWARDED, METHODS
from onefold.optim.loss_scale import LossScale
from onefold.optim.step import ShardedStep


class ShardedOptimizer(torch.optim.Optimizer):
    """The optimizer that `initialize` returns. Schedulers read and write its `param_groups`; `engine.step()` steps it.

    It uses the group dicts of the user's instance, so that a scheduler built on the instance works. Methods of the
    instance are forwarded to this object: `step` raises, and `zero_grad` drops gradients. `state` is empty, because
    states belong to flat shards. torch's constructor is not called, because it would import torch's compiler.
    """

    engine: weakref.ref[Any]
    """The engine that steps this optimizer."""

    def __init__(
        self, sharded: ShardedStep, loss_scale: LossScale, drop_gradients: weakref.WeakMethod[Callable[[], None]]
    ) -> None:
        self.sharded = sharded
        self.optimizer = sharded.instance or self
        first = {key: value for key, value in sharded.groups[0].items() if key != "params"}
        self.defaults: dict[str, Any] = sharded.instance.defaults if sharded.instance else first
        self.state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        self._optimizer_step_pre_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._loss_scale = loss_scale
        self._drop_gradients = drop_gradients
        for instance in sharded.instances:
            self.answer_for(instance)

    def answer_for(self, instance: torch.optim.Optimizer) -> None:
        """Forward the methods of an instance over the same groups, which has no gradients or states, to this one."""
        for name in FORWARDED:
            if callable(method := getattr(instance, name, None)):
                vars(instance)[name] = _forwarding(name, method, weakref.ref(instance), weakref.ref(self))

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.sharded.groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.sharded.groups = groups

    @property
    def name(self) -> str:
        return self.sharded.name

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite."""
        return self.sharded.overflow

    @property
    def loss_scale(self) -> float:
        return self._loss_scale.value

    cur_scale = loss_scale

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("the optimizer cannot be stepped directly. Call engine.step() instead.")

    def zero_grad(self, set_to_none: bool = True) -> None:
        if (drop := self._drop_gradients()) is not None:
            drop()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise RuntimeError("parameter groups cannot be added after initialize. Pass all of them to initialize.")

    def offload_states(
        self,
        include: Iterable[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> dict[str, int]:
        """Call `engine.offload_states`."""
        freed: dict[str, int] = self._live_engine.offload_states(include, device, pin_memory, non_blocking)
        return freed

    def reload_states(self, non_blocking: bool = False) -> dict[str, int]:
        """Call `engine.reload_states`."""
        restored: dict[str, int] = self._live_engine.reload_states(non_blocking)
        return restored

    @property
    def _live_engine(self) -> Any:
        engine = self.engine()
        if engine is None:
            raise RuntimeError("the engine of this optimizer is closed, and its shards are freed")
        return engine

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("optimizer states are sharded. Call engine.save_checkpoint to save them.")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise RuntimeError("optimizer states are sharded. Call engine.load_checkpoint to load them.")

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the user's instance that this class does not have."""
        sharded = self.__dict__.get("sharded")
        if sharded is None or sharded.instance is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        value = getattr(sharded.instance, name)
        if name in METHODS and callable(value):
            return partial(sharded.call, name)
        if inspect.ismethod(value) and value.__self__ is sharded.instance:
            raise AttributeError(
                f"optimizer {self.name}: {name}() is not supported, because its parameters are flat shards. "
                f"Only step, {' and '.join(METHODS)} are."
            )
        return value

    def __repr__(self) -> str:
        return f"ShardedOptimizer({self.name}, {len(self.param_groups)} groups, {len(self.sharded.stores)} shards)"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a ShardedOptimizer cannot be pickled. Call engine.save_checkpoint to save its states.")


def _forwarding(
    name: str, method: Any, instance: weakref.ref[torch.optim.Optimizer], outer: weakref.ref[ShardedOptimizer]
) -> Callable[..., Any]:
    """Return a method that calls `outer`, or the instance's class in user code. It keeps neither object alive."""

    def call(target: Any, *args: Any, **kwargs: Any) -> Any:
        owner = outer()
        if owner is None or owner.sharded.in_user_code:
            return getattr(type(target), name)(target, *args, **kwargs)
        return getattr(owner, name)(*args, **kwargs)

    @wraps(getattr(method, "__func__", method))  # preserves the attributes that a scheduler has set on `step`
    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(instance(), *args, **kwargs)

    vars(forward).update({"__func__": call, FORWARD_MARK: True})  # a scheduler wraps `__func__` of a bound method
    return forward
