"""Read unsharded fp32 weights from a checkpoint, under the names of DeepSpeed's `zero_to_fp32`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from onefold.checkpoint.format.files import CheckpointError
from onefold.checkpoint.format.manifest import Manifest
from onefold.checkpoint.format.shard_files import CheckpointReader
from onefold.checkpoint.tools.export import ExportError, WeightSelection, export, read_one, spell_names
from onefold.log import logger
from onefold.storage.place import Place

Model = TypeVar("Model", bound=nn.Module)


class LazyTensor:
    """A tensor of a checkpoint that is read by `contiguous`. Tied names share one."""

    def __init__(self, folder: Place, manifest: Manifest, name: str, dtype: torch.dtype) -> None:
        self._folder, self._manifest, self._name = folder, manifest, name
        self.shape = torch.Size(manifest.tensors[name].shape)
        self.dtype = dtype

    def contiguous(self) -> torch.Tensor:
        """Read the tensor."""
        with CheckpointReader(self._folder, self._manifest) as checkpoint:
            return checkpoint.tensor(self._name, self.dtype)

    def __repr__(self) -> str:
        return f"LazyTensor({self._name.removeprefix('model/')!r}, {list(self.shape)}, {self.dtype})"


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """Return the weights of a checkpoint as fp32 tensors in host memory, including buffers and tied names.

    With `lazy_mode` the values are `LazyTensor` objects, which know their shape and dtype: `value.contiguous()` reads
    one of them.
    """

    def work(checkpoint: CheckpointReader) -> dict[str, Any]:
        weights = WeightSelection.of(checkpoint, torch.float32, exclude_frozen=exclude_frozen_parameters)
        source = checkpoint.folder, checkpoint.manifest
        found: dict[str, Any] = {
            name: LazyTensor(*source, f"model/{name}", dtype) if lazy_mode else weights.read(name)
            for name, dtype in weights.dtypes.items()
        }
        return found | {alias: found[name] for alias, name in weights.aliases.items()}

    return read_one(checkpoint_dir, tag, work)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights of a checkpoint in fp32 to `pytorch_model.bin`, or with `safe_serialization` to safetensors.

    Weights that exceed `max_shard_size` are written to several files with an index.
    """
    export(
        checkpoint_dir,
        output_dir,
        tag=tag,
        file_format="safetensors" if safe_serialization else "bin",
        max_shard_size=max_shard_size,
        exclude_frozen=exclude_frozen_parameters,
    )


def load_state_dict_from_zero_checkpoint(
    model: Model, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> Model:
    """Move a model to the CPU and load the weights of a checkpoint into it.

    Names that only the model or only the checkpoint has are logged as warnings. A sharded model must be gathered with
    `GatheredParameters(model.parameters(), modifier_rank=0)` and is not moved.
    """
    from onefold.runtime import handle_of

    handles = {name: handle_of(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        handle = handles[name]
        if handle is not None and not handle.num_acquired and not handle.location_of(parameter)[0].stays_unsharded:
            raise ExportError(
                f"{name} is sharded. Pass a model that was built without zero.Init and has no stage 3 "
                "engine, or load into the engine with engine.load_checkpoint(..., load_module_only=True)."
            )
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    if not any(handle is not None and handle.num_acquired for handle in handles.values()):
        model = model.cpu()
    misfits = model.load_state_dict(state, strict=False)
    for what, names in (("not in the checkpoint", misfits.missing_keys), ("not in the model", misfits.unexpected_keys)):
        if names:
            logger.warning("%s: %d tensors are %s: %s", checkpoint_dir, len(names), what, spell_names(names))
    return model


def main(
    argv: Sequence[str] | None = None, *, prog: str = "zero_to_fp32.py", dtypes: Mapping[str, str] | None = None
) -> None:
    """Run the command line of zero_to_fp32.py. `dtypes` adds --dtype, with the names that users type for dtypes."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Write the unsharded weights of a checkpoint in fp32. No GPU and little memory are needed.",
        epilog="example: python zero_to_fp32.py . fp32_weights --tag global_step100. `onefold export` also writes bf16 "
        "and fp16.",
    )
    add = parser.add_argument
    add("checkpoint_dir", help="folder with the file `latest` and the checkpoints, or the folder of one checkpoint")
    add("output_dir", help="folder to write to")
    if dtypes is not None:
        add("--dtype", required=True, choices=sorted(dtypes), help="the dtype of floating-point weights")
    add("--max_shard_size", default="5GB", help="maximum size of a file, e.g. 500MB or 2GiB (default: 5GB)")
    add("--safe_serialization", action="store_true", help="safetensors (streamed) instead of pytorch_model.bin")
    add("-t", "--tag", help="tag of the checkpoint (default: the tag in the file `latest`)")
    add("--exclude_frozen_parameters", action="store_true", help="leave out frozen parameters")
    add("-d", "--debug", action="store_true", help="list each tensor, and show tracebacks")
    options = parser.parse_args(argv)

    def tell(name: str, done: int, total: int) -> None:
        print(f"{done / max(1, total):4.0%} {name}", file=sys.stderr)

    try:
        exported = export(
            options.checkpoint_dir,
            options.output_dir,
            tag=options.tag,
            dtype="fp32" if dtypes is None else dtypes[options.dtype],
            file_format="safetensors" if options.safe_serialization else "bin",
            max_shard_size=options.max_shard_size,
            exclude_frozen=options.exclude_frozen_parameters,
            progress=tell if options.debug else None,
        )
    except (CheckpointError, ExportError, OSError) as error:
        if options.debug:
            raise
        sys.exit(f"{prog}: {error}")
    print(f"{exported.num_tensors} tensors of {exported.checkpoint} in {', '.join(map(str, exported.files))}")


if __name__ == "__main__":
    main()
