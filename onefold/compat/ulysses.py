"""Sequence parallelism by DeepSpeed's names: `UlyssesSPAttentionHF`, and its data loader."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from onefold.comm import Ledger, data_group, local_device, sequence_group
from onefold.compat import groups
from onefold.sequence import SequenceLoader, SequenceRanks


class SequenceMesh:
    """The groups of ranks that `deepspeed.initialize(mpu=...)` and `deepspeed.utils.groups` ask for."""

    def __init__(self, size: int, *, disable_in_eval: bool = False) -> None:
        self.ranks = SequenceRanks(sequence_group(size, data_group()) if size > 1 else None, Ledger(), local_device())
        self.disable_in_eval = disable_in_eval

    def get_sequence_parallel_group(self) -> Any:
        return self.ranks.group.process_group if self.ranks.group is not None else None

    def get_sequence_parallel_world_size(self) -> int:
        return self.ranks.size

    def get_sequence_parallel_rank(self) -> int:
        return self.ranks.rank

    def get_sequence_data_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size() // self.ranks.size

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank() // self.ranks.size


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Divide sequences among so many neighbouring ranks, in all engines that are made from now on."""
    groups.mpu = SequenceMesh(sequence_parallel_size)


class UlyssesSPAttentionHF:
    """Attention of transformers models under sequence parallelism, as DeepSpeed names it."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int | None = None,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        **unused: Any,
    ) -> SequenceMesh | None:
        """Return the groups for `deepspeed.initialize(mpu=...)`, which replaces the attention of its model.

        Models, lengths and the core implementation have no effect here: any model and length is divided, and torch's
        SDPA computes the attention. `disable_in_eval` leaves models in evaluation mode undivided.
        """
        groups.mpu = None
        if sequence_parallel_size > 1:
            groups.mpu = SequenceMesh(sequence_parallel_size, disable_in_eval=disable_in_eval)
        return groups.mpu  # type: ignore[no-any-return]


class UlyssesSPDataLoaderAdapter(SequenceLoader):
    """Yields this rank's parts of the batches that the ranks of a sequence load, with `shift_labels`."""

    def __init__(
        self, dl: Iterable[Any], sp_rank: int, sp_group: Any, sp_world_size: int, device: torch.device | str
    ) -> None:
        group = sequence_group(sp_world_size, data_group()) if sp_world_size > 1 else None
        super().__init__(dl, SequenceRanks(group, Ledger(), torch.device(device)), shifts_labels=True)

    @property
    def dataset(self) -> Any:
        """The samples of the inner loader. Accelerate's `skip_first_batches` would make a loader of whole sequences."""
        if sys._getframe(1).f_code.co_name == "skip_first_batches":
            raise RuntimeError(
                "sequence parallelism: Accelerate cannot skip batches of parts of sequences, to resume inside an "
                "epoch. Pass ignore_data_skip=True to TrainingArguments, or resume from the end of an epoch."
            )
        return self.loader.dataset  # type: ignore[attr-defined]
