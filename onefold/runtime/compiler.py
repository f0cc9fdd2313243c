"""Living beside torch.compile without importing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._C._dynamo import eval_frame

_P = ParamSpec("_P")
_R = TypeVar("_R")


def outside_compiler(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have a compiled model call this function as it is, with everything it calls.

    `torch.compiler.disable` does the same, but imports the compiler: 1.5 s a rank at start-up. The mark keeps the
    function from being inlined into a graph, the strategy keeps its frames from being compiled.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))  # type: ignore[attr-defined]
    return function
