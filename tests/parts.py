"""`make test-gpu ARGS="--part 1/3"`: a part of the tests that need a GPU. A file is in one part as a whole: its tests
share ranks, and ranks on a GPU are slow to start.
"""

from __future__ import annotations

from collections.abc import Collection

# About how long each takes on one GPU; what is not named takes a moment.
SECONDS = {
    "test_bench_tiers.py": 20,
    "test_checkpointing.py": 20,
    "test_gpu.py": 130,
    "test_gpu_checkpoints.py": 30,
    "test_gpu_chunks.py": 60,
    "test_gpu_codec.py": 30,
    "test_gpu_early_step.py": 40,
    "test_gpu_fp8.py": 100,
    "test_gpu_fsdp.py": 90,
    "test_gpu_graphs.py": 170,
    "test_gpu_held_parameters.py": 80,
    "test_gpu_offload.py": 90,
    "test_gpu_hangs.py": 35,
    "test_gpu_muon.py": 60,
    "test_gpu_ranks.py": 90,
    "test_gpu_ranks_models.py": 90,
    "test_gpu_ranks_tiers.py": 70,
    "test_gpu_sequence.py": 60,
    "test_gpu_speculation.py": 40,
    "test_gpu_states.py": 90,
    "test_gpu_steps.py": 50,
    "test_gpu_timeline.py": 60,
    "test_gpu_wires.py": 50,
}


def files_of(part: str, files: Collection[str]) -> set[str]:
    """The files of part "k/n" of these: the longest first, each to the part that has the least to do so far."""
    number, _, num_parts = part.partition("/")
    if not (number.isdigit() and num_parts.isdigit() and 1 <= int(number) <= int(num_parts)):
        raise ValueError(f"--part {part}: expected a number and how many there are, as in 1/3")
    parts: list[set[str]] = [set() for _ in range(int(num_parts))]
    for file in sorted(files, key=lambda name: (-_seconds(name), name)):
        min(parts, key=lambda some: sum(map(_seconds, some))).add(file)
    return parts[int(number) - 1]


def _seconds(file: str) -> int:
    return SECONDS.get(file, 1)
