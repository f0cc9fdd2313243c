"""The blocks of a model, or all of it, as CUDA graphs: when they are captured, and what runs eagerly.

[Note: captured blocks]
With `onefold.cuda_graphs`, the forward of the module of each block is replaced (`CapturedForward`). Hooks of units run
around it as always, so gathers, reductions and the optimizer stay outside of the graphs. A call is known by its block
and its signature: structure and constants of its arguments, layouts of its tensors, autocast and training mode. A
call that repeats is first run eagerly, the third time while what a graph cannot repeat is looked for (`rehearse`). The
fourth time it is captured, and from then on it is replayed. Calls that cannot be captured run eagerly, with a reason.

The model itself may be such a block (`encloses`), if its parameters stay unsharded. The others are then parts of its
graphs. A model that a graph cannot repeat runs eagerly, and its blocks are captured one by one.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from onefold.config import ConfigError
from onefold.graphs.call_signature import HOST, NotCapturable, signature_of, with_tensors
from onefold.graphs.captured_call import CapturedCall, CapturedPass, Gradients
from onefold.graphs.side_effects import hook_tables, host_random_states, num_hooks, synchronizations
from onefold.log import logger

# The number of signatures of a block that are captured.
MAX_CAPTURES = 8
# The number of eager calls before a capture. The last one is a rehearsal.
REHEARSED = 3
# The pass that reports the captured blocks, also if there are none.
_FIRST_REPORT = REHEARSED + 3
_NOT_YET = "not captured yet"
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad


def _nothing() -> None:
    """Do nothing."""


class FlatWeights(Protocol):
    """A flat parameter of a block."""

    parameters: list[nn.Parameter]
    full: Tensor
    stays_unsharded: bool

    def views_of(self, flat: Tensor) -> list[Tensor]: ...


@dataclass(frozen=True)
class CapturableBlock:
    """A block as far as its graphs use it.

    `deliver` takes the gradients of each flat parameter. `is_own_hook` recognizes hooks that run outside of the
    captured forward, or that a replay need not run.
    """

    name: str
    module: nn.Module
    weights: Sequence[FlatWeights]
    deliver: Callable[[list[Gradients]], None]
    is_own_hook: Callable[[Any], bool]
    problem: str = ""
    """Why the block is not captured in any case."""
    encloses: bool = False
    """Whether the other blocks are inside of it."""
    before_forward: Callable[[], None] = _nothing
    """Called before each replay. It makes the parameters ready, which the replaced hooks of modules do otherwise, and
    copies gradients that are in the memory of the graphs."""
    square_sum: Callable[[Tensor], Tensor] | None = None
    """Computes the sum of squares of the gradients of a flat parameter, if graphs shall compute it."""


_State = CapturedCall | int | str
"""What is known about a call: its graphs, the number of eager calls before it is captured, or why it never is."""


class CapturedBlocks:
    """The captured blocks of one engine. `in_forward` returns whether a forward of the whole model is under way."""

    def __init__(
        self,
        blocks: Sequence[CapturableBlock],
        device: torch.device,
        in_forward: Callable[[], bool],
        *,
        logs: bool = False,
    ) -> None:
        if device.type == HOST:
            raise ConfigError(f"onefold.cuda_graphs needs a CUDA device, but the model is on {device}.")
        self._device, self._in_forward, self._logs = device, in_forward, logs
        self._forwards = [CapturedForward(block, self) for block in blocks]
        self._passes: list[CapturedPass] = []
        # Whether the present pass has captured calls, which share the last of `_passes`.
        self._captures = False
        self._memory: dict[tuple[int, torch.dtype], Tensor] = {}
        self._num_passes = 0
        # Whether the model is called, and may be captured: its blocks are parts of it.
        self._in_model = False
        self.num_replays = 0
        # The number of eager calls in training by reason.
        self.eager_calls: Counter[str] = Counter()

    @property
    def num_captured(self) -> int:
        """The number of captured calls."""
        return sum(isinstance(state, CapturedCall) for forward in self._forwards for state in forward.states.values())

    @property
    def reasons(self) -> dict[str, str]:
        """Why blocks run eagerly, by the name of the block."""
        found = {forward.block.name: forward.block.problem for forward in self._forwards if forward.block.problem}
        for forward in self._forwards:
            for state in forward.states.values():
                if isinstance(state, str):
                    found[forward.block.name] = state
        return found

    def begin_pass(self) -> None:
        """Begin a pass of the model that will have a backward."""
        self._num_passes += 1
        if self._captures:
            self._passes[-1].end_capture()
        if self._logs and (self._captures or self._num_passes == _FIRST_REPORT):
            logger.info("CUDA graphs: %s", self.describe())
        self._captures = False
        for shared in self._passes:
            shared.begin()

    def describe(self) -> str:
        """Return how many blocks are captured, and why others run eagerly."""
        captured = {f.block.name for f in self._forwards if any(isinstance(s, CapturedCall) for s in f.states.values())}
        models = {forward.block.name for forward in self._forwards if forward.block.encloses}
        blocks = {forward.block.name for forward in self._forwards} - models
        lines = [f"{len(captured - models)} of {len(blocks)} blocks captured"] if not captured & models else []
        lines += ["the whole model captured"] if captured & models else []
        by_block = self.reasons
        for reason in dict.fromkeys(by_block.values()):
            names = [name for name, found in by_block.items() if found == reason]
            others = f" and {len(names) - 1} others" if names[1:] else ""
            lines.append(f"{names[0]}{others} eager: {reason}")
        own = {*by_block.values(), _NOT_YET}
        lines += [f"{number} eager calls: {why}" for why, number in self.eager_calls.items() if why not in own]
        return "; ".join(lines)

    def _pass_to_capture(self) -> CapturedPass:
        """Return what the calls that the present pass captures share."""
        if not self._captures:
            self._captures = True
            torch.cuda.empty_cache()  # graphs cannot use memory that the allocator keeps for eager tensors
            states = (state for forward in self._forwards for state in forward.states.values())
            self._passes = list({id(s.shared): s.shared for s in states if isinstance(s, CapturedCall)}.values())
            self._passes.append(CapturedPass(self._device, self._weights()))
        return self._passes[-1]

    def _weights(self) -> dict[tuple[int, torch.dtype], Tensor]:
        """Return memory for the flat parameters of any block, by their position in the block."""
        if not self._memory:
            sizes: dict[tuple[int, torch.dtype], int] = {}
            for forward in self._forwards:
                for position, weights in enumerate(forward.moving_weights):
                    key = position, weights.full.dtype
                    sizes[key] = max(sizes.get(key, 0), weights.full.numel())
            for (position, dtype), size in sizes.items():
                self._memory[position, dtype] = torch.empty(size, dtype=dtype, device=self._device)
        return self._memory

    def call(self, forward: CapturedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a block in training: replay it, capture it, or run it eagerly."""
        if self._in_model:
            return forward.function(*args, **kwargs)
        if problem := forward.block.problem or self._problem_of_call():
            return self._run_eagerly(problem, forward, args, kwargs)
        tensors: list[Tensor] = []
        try:
            key = forward.signature_of_call(args, kwargs, tensors)
        except NotCapturable as reason:
            return self._run_eagerly(str(reason), forward, args, kwargs)
        state = forward.states.setdefault(key, 0)
        if isinstance(state, CapturedCall) and (changed := forward.change_since_capture()):
            forward.forget()
            return self._run_eagerly(changed, forward, args, kwargs)
        if isinstance(state, str):
            return self._run_eagerly(state, forward, args, kwargs)
        self._in_model = forward.block.encloses
        try:
            return self._call_captured(forward, key, state, tensors, args, kwargs)
        finally:
            self._in_model = False

    def _call_captured(
        self,
        forward: CapturedForward,
        key: Hashable,
        state: CapturedCall | int,
        tensors: list[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a block that is captured, or may be."""
        if state == REHEARSED:
            found = forward.states[key] = self._capture(forward, args, kwargs, tensors)
            if isinstance(found, str):
                self._in_model = False
                return self._run_eagerly(found, forward, args, kwargs)
            state = found
        if isinstance(state, int):
            self.eager_calls[_NOT_YET] += 1
            forward.states[key] = state + 1
            if state + 1 < REHEARSED:
                return forward.function(*args, **kwargs)
            output, problem = forward.rehearse(args, kwargs, tensors)
            forward.states[key] = problem or REHEARSED
            return output
        forward.block.before_forward()
        done, output = state.replay(tensors)
        if not done:
            conflict = "called twice or with other shared arguments, or before an earlier backward"
            return self._run_eagerly(conflict, forward, args, kwargs)
        self.num_replays += 1
        return output

    def _run_eagerly(self, reason: str, forward: CapturedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.eager_calls[reason] += 1
        return forward.function(*args, **kwargs)

    def _problem_of_call(self) -> str:
        """Return why a call made now cannot be replayed, or an empty string."""
        if not self._in_forward():
            return "called outside of a forward of the model"
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:  # type: ignore[attr-defined]
            return "called under hooks on saved tensors, such as those of a checkpoint"
        if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
            return "called under a mode of torch"
        return "hooks on all modules" if torch_module._has_any_global_hook() else ""

    def _capture(
        self, forward: CapturedForward, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> CapturedCall | str:
        if forward.num_captures >= MAX_CAPTURES:
            return f"more than {MAX_CAPTURES} signatures"
        try:
            return forward.capture(self._pass_to_capture(), args, kwargs, tensors)
        except NotCapturable as reason:
            return str(reason)
        except RuntimeError as error:
            return f"it cannot be captured: {str(error).splitlines()[0]}"

    def remove(self) -> None:
        """Restore the forwards of the modules, and free all graphs."""
        while self._forwards:
            self._forwards.pop().remove()
        self._passes.clear()


class CapturedForward:
    """The forward of a block that is captured and replayed."""

    def __init__(self, block: CapturableBlock, owner: CapturedBlocks) -> None:
        self.block, self._owner = block, owner
        module = block.module
        self._set_on_module = module.__dict__.get("forward")
        self.function: Callable[..., Any] = module.forward
        self.states: dict[Hashable, _State] = {}
        self.num_captures = 0
        self.moving_weights = [weights for weights in block.weights if not weights.stays_unsharded]
        self._modules = list(module.modules())
        self._hooks = [hooks for inner in self._modules for hooks in hook_tables(inner)]
        self._buffers = [inner._buffers for inner in self._modules if inner._buffers]
        self._parameters = [parameter for weights in block.weights for parameter in weights.parameters]
        # The positions of outputs that got a gradient in the rehearsed step, if this is the model.
        self._used_outputs: set[int] = set()
        # What a graph depends on and a program may change: tables of hooks, buffers, flags and addresses.
        self._as_captured: tuple[Any, ...] = ()
        functools.update_wrapper(self, self.function, updated=())
        module.forward = self  # type: ignore[method-assign]

    def remove(self) -> None:
        """Restore the forward of the module."""
        self.states.clear()
        self.block.module.__dict__.pop("forward", None)
        if self._set_on_module is not None:
            self.block.module.__dict__["forward"] = self._set_on_module

    def __reduce__(self) -> Any:
        """Copy and pickle as the original forward, because no engine manages the copy of a model."""
        return _same, (self.function,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the block: by its graph in training, eagerly in evaluations and recomputations."""
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return self.function(*args, **kwargs)
        return self._owner.call(self, args, kwargs)

    def signature_of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Hashable:
        """Return what identifies a call, and append its tensors to a list."""
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        return self.block.module.training, autocast, signature_of(args, tensors), signature_of(kwargs, tensors)

    # -- before a capture ---------------------------------------------------------------------------------------

    def rehearse(self, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> tuple[Any, str]:
        """Run a call eagerly. Return its output, and why a graph cannot repeat it, or an empty string."""
        if problem := self._problem_of_module():
            return self.function(*args, **kwargs), problem
        versions = [tensor._version for tensor in tensors]
        before, numbers = self._stored(), host_random_states()
        with synchronizations() as found:
            output = self.function(*args, **kwargs)
        if self.block.encloses:
            output, problem = self._watch_outputs(output)
            if problem:
                return output, problem
        if found:
            return output, f"it waits for the GPU: {found[0]}"
        if [tensor._version for tensor in tensors] != versions:
            return output, "it writes to its arguments"
        if host_random_states() != numbers:
            return output, "it draws random numbers on the host"
        after = self._stored()
        for module, was, now in zip(self._modules, before, after, strict=True):
            if names := [name for name in was.keys() | now.keys() if was.get(name) is not now.get(name)]:
                return output, f"it changes {', '.join(sorted(names))} of a {type(module).__name__}"
        return output, ""

    def _watch_outputs(self, output: Any) -> tuple[Any, str]:
        """Find out at which outputs of the model the backward begins, because it is captured with the forward.

        Return the outputs, and why a graph cannot return them, or an empty string.
        """
        outputs: list[Tensor] = []
        try:
            signature_of(output, outputs, "its output")
        except NotCapturable as reason:
            return output, str(reason)
        self._used_outputs = set()
        returned = []
        for position, tensor in enumerate(outputs):
            if tensor.requires_grad:  # the tensor itself may also get a gradient from another output
                tensor = tensor.view_as(tensor)
                tensor.register_hook(functools.partial(_note_position, self._used_outputs, position))
            returned.append(tensor)
        return with_tensors(output, iter(returned)), ""

    def _problem_of_module(self) -> str:
        """Return why the module cannot be captured, or an empty string."""
        own = {id(parameter) for weights in self.block.weights for parameter in weights.parameters}
        for name, parameter in self.block.module.named_parameters():
            if id(parameter) not in own and parameter.requires_grad:
                return f"its parameter {name} belongs to another unit"
        for module in self._modules:
            for hooks in hook_tables(module):
                may_have_own = module is self.block.module or self.block.encloses
                if not all(may_have_own and self.block.is_own_hook(hook) for hook in hooks.values()):
                    return f"a {type(module).__name__} in it has hooks"
        for weights in self.block.weights:
            for parameter in weights.parameters:
                if num_hooks(parameter) > (1 if weights.stays_unsharded else 2):  # the engine's own
                    return "a parameter in it has hooks"
        return ""

    def _stored(self) -> list[dict[str, Any]]:
        return [{**module.__dict__, **module._buffers} for module in self._modules]

    # -- capture and replay -------------------------------------------------------------------------------------

    def capture(self, shared: CapturedPass, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> CapturedCall:
        """Capture a call."""
        tables: list[tuple[dict[str, Any], str, Tensor]] = []
        leaves: list[Tensor] = []
        moved: list[tuple[Tensor, FlatWeights]] = []
        replaced: dict[int, Tensor] = {}
        for weights in self.block.weights:
            flat = weights.full
            if not weights.stays_unsharded:
                flat = shared.weights(self.moving_weights.index(weights), weights.full)
                moved.append((flat, weights))
            for parameter, view in zip(weights.parameters, weights.views_of(flat), strict=True):
                leaf = nn.Parameter(view.data, requires_grad=_REQUIRES_GRAD.__get__(parameter))
                leaves.append(leaf)
                replaced[id(parameter)] = leaf
        for module in self._modules:
            for name, own in dict.items(module._parameters):
                if id(own) in replaced:
                    tables.append((module._parameters, name, replaced[id(own)]))

        def run(statics: list[Tensor]) -> Any:
            remaining = iter(statics)
            before = [dict.__getitem__(table, name) for table, name, _ in tables]
            try:
                for table, name, leaf in tables:
                    dict.__setitem__(table, name, leaf)
                return self.function(*with_tensors(args, remaining), **with_tensors(kwargs, remaining))
            finally:
                for (table, name, _), parameter in zip(tables, before, strict=True):
                    dict.__setitem__(table, name, parameter)

        def load() -> None:
            for flat, weights in moved:
                flat.copy_(weights.full)

        def collect(gradients: list[Tensor | None]) -> list[Gradients]:
            remaining = iter(gradients)
            found = [_flattened(weights, [next(remaining) for _ in weights.parameters]) for weights in block.weights]
            if not block.encloses:
                return found
            squares = [
                block.square_sum(some.flat) if block.square_sum and some.flat is not None else None for some in found
            ]
            return [some._replace(square=square, stays=True) for some, square in zip(found, squares, strict=True)]

        block, used = self.block, None
        if block.encloses:
            if not self._used_outputs:
                raise NotCapturable("no output got a gradient in the step before the capture")
            used = sorted(self._used_outputs)
        found = CapturedCall(block.name, shared, tensors, leaves, run, load, collect, block.deliver, used)
        self.num_captures += 1
        self._as_captured = self._surroundings()
        return found

    def _surroundings(self) -> tuple[Any, ...]:
        """Return what graphs of this block depend on besides arguments and values of parameters."""
        return (
            [*map(len, self._hooks), *map(num_hooks, self._parameters)],
            [module.training for module in self._modules],
            [buffer.data_ptr() for table in self._buffers for buffer in table.values() if buffer is not None],
            [weights.full.data_ptr() for weights in self.block.weights if weights.stays_unsharded],
            [*map(_REQUIRES_GRAD.__get__, self._parameters)],
        )

    def change_since_capture(self) -> str:
        """Return what has changed since the block was captured, or an empty string."""
        now = self._surroundings()
        if now == self._as_captured:
            return ""
        kinds = ("hooks", "the training mode", "buffers", "addresses of parameters", "frozen parameters")
        pairs = zip(kinds, now, self._as_captured, strict=True)
        return f"{', '.join(kind for kind, new, old in pairs if new != old)} changed since the capture"

    def forget(self) -> None:
        """Free the graphs of this block, to capture it again."""
        self.states = {key: state for key, state in self.states.items() if isinstance(state, str)}


def _flattened(weights: FlatWeights, gradients: Sequence[Tensor | None]) -> Gradients:
    """Copy the gradients of parameters to a tensor with the layout of their flat parameter."""
    present = {index: gradient for index, gradient in enumerate(gradients) if gradient is not None}
    if not present:
        return Gradients(None, ())
    flat = torch.zeros_like(weights.full)
    views = weights.views_of(flat)
    torch._foreach_copy_([views[index] for index in present], list(present.values()))
    return Gradients(flat, tuple(present))


def _note_position(positions: set[int], position: int, _: Tensor) -> None:
    positions.add(position)


def _same(value: Any) -> Any:
    return value
