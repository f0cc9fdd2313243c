"""`deepspeed.comm`: torch.distributed's functions, started by onefold."""

from __future__ import annotations

from onefold.compat.lazy import names, same

FROM_TORCH = {
    **same(
        "torch.distributed",
        "Backend", "P2POp", "ProcessGroup", "ReduceOp", "all_gather", "all_gather_coalesced", "all_gather_into_tensor",
        "all_gather_object", "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier",
        "batch_isend_irecv", "broadcast", "broadcast_object_list", "destroy_process_group", "gather", "get_backend",
        "get_process_group_ranks", "get_rank", "get_world_size", "group", "irecv", "is_available", "is_initialized",
        "isend", "monitored_barrier", "new_group", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor",
        "scatter", "send",
    ),
    "allgather_fn": "torch.distributed.all_gather_into_tensor",
    "inference_all_reduce": "torch.distributed.all_reduce",
    "reduce_scatter_fn": "torch.distributed.reduce_scatter_tensor",
}  # fmt: skip

__getattr__, __dir__ = names(
    __name__,
    {
        **FROM_TORCH,
        **same(
            "onefold.compat.deepspeed.comm.comm",
            "configure", "get_all_ranks_from_group", "get_global_rank", "get_local_rank", "get_world_group",
            "has_all_gather_into_tensor", "has_all_reduce_coalesced", "has_coalescing_manager",
            "has_reduce_scatter_tensor", "init_distributed", "initialize_mesh_device", "log_summary",
            "get_world_rank_from_launcher", "get_world_size_from_launcher", "in_multi_rank_mpi_job", "mpi_discovery",
            "single_process_discovery",
        ),
        **same("onefold.compat.deepspeed.comm.torch", "TorchBackend"),
    },
)  # fmt: skip
