"""The engine hands whole weights out, and takes them in."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onefold.checkpoint.loading.model_slots import consolidate, save_weights
from onefold.engine.parking import Parking


class Weights(Parking):
    """The part of the engine that knows the model as a whole."""

    @property
    def module(self) -> nn.Module:
        """The bare model, whole: whatever `step` left in flight has arrived."""
        self._schedule.settle_all()
        return self._model

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor]:
        """The model's whole state dict. All ranks call this together.

        Where parameters are sharded it is gathered unit by unit into host memory of rank 0; other ranks get an empty
        dict.
        """
        self._flush()
        if self._schedule.sharded:
            return consolidate(self.module, exclude_frozen=exclude_frozen_parameters) or {}
        kept = {name for name, p in self.module.named_parameters(remove_duplicate=False) if not p.requires_grad}
        found = self.module.state_dict()
        return {n: tensor for n, tensor in found.items() if not (exclude_frozen_parameters and n in kept)}

    def load_module_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """`load_state_dict` on the model: every rank passes the same whole weights."""
        self.module.load_state_dict(state_dict, strict=strict)

    def save_16bit_model(
        self,
        save_dir: str,
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
        max_shard_size: int | str = "5GB",
    ) -> bool:
        """Write the whole weights, as they compute, for `from_pretrained`. All ranks call this together.

        Safetensors unless the file name ends otherwise (`pytorch_model.bin` is pickled by torch).
        """
        self._check_present()
        self._flush()
        save_weights(
            self.module,
            save_dir,
            file_name=save_filename,
            max_shard_size=max_shard_size,
            exclude_frozen=exclude_frozen_parameters,
        )
        return True

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """What accelerate calls: the whole state dict on rank 0, None elsewhere."""
        self._flush()
        return consolidate(self.module, exclude_frozen=exclude_frozen_parameters)

    def _flush(self) -> None:
        if self.optimizer is not None:
            self.optimizer.flush()
