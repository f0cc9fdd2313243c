#!/usr/bin/env python
"""The weights of the checkpoints in this folder, whole and in fp32.

    python zero_to_fp32.py CHECKPOINT_FOLDER OUTPUT_FOLDER [--tag TAG] [--max_shard_size 5GB] [--safe_serialization]

Needs onefold (`pip install onefold`), no GPU and no process group. `onefold export` does the same and more.
"""

from onefold.checkpoint.export import main

if __name__ == "__main__":
    main()
