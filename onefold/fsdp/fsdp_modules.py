"""The FSDP2 modules of a model and what each all-gathers. The only file here that reads private names of FSDP2."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def parameters_by_module(model: nn.Module) -> dict[nn.Module, list[nn.Parameter]]:
    """Return the FSDP2 modules of a model, each with the parameters that no FSDP2 module below it has."""
    found: dict[nn.Module, list[nn.Parameter]] = {}

    def visit(module: nn.Module, owner: list[nn.Parameter] | None) -> None:
        if isinstance(module, FSDPModule):
            owner = found.setdefault(module, [])
        if owner is not None:
            owner.extend(module.parameters(recurse=False))
        for child in module.children():
            visit(child, owner)

    visit(model, None)
    return found


def modules_gathered_with(module: nn.Module) -> list[nn.Module]:
    """Return the FSDP2 modules whose parameters FSDP2 all-gathers before the forward of `module`.

    These are the modules of its `fully_shard` call, and those of `set_modules_to_forward_prefetch`.
    """
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    return [each for of in (state, *state._states_to_forward_prefetch) for each in of._modules]
