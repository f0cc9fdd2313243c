"""Whole fp32 weights out of a checkpoint, where DeepSpeed's users import it from."""

from __future__ import annotations

from onefold.checkpoint.export import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
    main,
)

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]

if __name__ == "__main__":
    main()
