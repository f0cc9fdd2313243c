"""Files that tools read and write by themselves, under the names of DeepSpeed's checkpoint engines."""

from onefold.compat.lazy import names, same

_D = "onefold.compat.deepspeed.runtime.checkpoint_engine"
__getattr__, __dir__ = names(
    __name__,
    {
        **same(f"{_D}.torch_checkpoint_engine", "CheckpointCommitInfo", "CheckpointEngine", "TorchCheckpointEngine"),
        **same(f"{_D}.datastates_checkpoint_engine", "DataStatesCheckpointEngine"),
        **same(f"{_D}.decoupled_checkpoint_engine", "DecoupledCheckpointEngine"),
        **same(f"{_D}.fast_checkpoint_engine", "FastCheckpointEngine"),
        **same(f"{_D}.utils", "create_checkpoint_engine"),
    },
)
