"""The weights of a checkpoint, whole, in a format of one's choice."""

import argparse

from onefold.compat import zero_to_fp32


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("checkpoint_dir", help="the folder with `latest` and the tags' folders, or a tag's folder")
    add("output_dir", help="the folder to write to")
    add("--dtype", required=True, choices=sorted(zero_to_fp32.OUTPUT_DTYPE_NAMES), help="the format of the weights")
    add("--max_shard_size", default="5GB", help="where to cut into several files: 500MB, 5GB (default), 2GiB")
    add("--safe_serialization", action="store_true", help="safetensors (streamed) instead of pytorch_model.bin")
    add("-t", "--tag", help="which checkpoint (default: what `latest` names)")
    add("--exclude_frozen_parameters", action="store_true", help="leave out parameters that were not trained")
    add("-d", "--debug", action="store_true", help="accepted; errors say where they come from anyway")
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
