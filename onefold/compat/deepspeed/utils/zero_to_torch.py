"""The weights of a checkpoint, whole, in a format of one's choice."""

import argparse

from onefold.compat.deepspeed.utils import zero_to_fp32


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("checkpoint_dir", help="folder with the file `latest` and the checkpoints, or the folder of one checkpoint")
    add("output_dir", help="folder to write to")
    add("--dtype", required=True, choices=sorted(zero_to_fp32.OUTPUT_DTYPE_NAMES), help="dtype of the weights")
    add("--max_shard_size", default="5GB", help="maximum size of a file, e.g. 500MB or 2GiB (default: 5GB)")
    add("--safe_serialization", action="store_true", help="safetensors (streamed) instead of pytorch_model.bin")
    add("-t", "--tag", help="tag of the checkpoint (default: the tag in the file `latest`)")
    add("--exclude_frozen_parameters", action="store_true", help="leave out frozen parameters")
    add("-d", "--debug", action="store_true", help="ignored")
    options = parser.parse_args(argv)
    zero_to_fp32.convert_zero_checkpoint_to_state_dict(
        options.checkpoint_dir,
        options.output_dir,
        dtype=options.dtype,
        max_shard_size=options.max_shard_size,
        safe_serialization=options.safe_serialization,
        tag=options.tag,
        exclude_frozen_parameters=options.exclude_frozen_parameters,
    )


if __name__ == "__main__":
    main()
