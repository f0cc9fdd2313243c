"""The case that the page computes: a model, a machine and a setting."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PerElement:
    """Bytes per element that every rank stores and, as `..._sharded`, that all ranks store together."""

    in_cpu: float
    """Of parameters within `max_in_cpu`."""
    in_cpu_sharded: float
    rest: float
    rest_sharded: float


@dataclass(frozen=True)
class Case:
    """A decoder of equal blocks, the nodes that train it with Adam, and the setting, as the plan sees it."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    tied: bool
    gated: bool
    """Whether the MLP has three matrices, as in Llama, or two, as in GPT."""
    gpus: int
    """GPUs per node."""
    nodes: int
    gpu_memory: float
    """Bytes per GPU."""
    host_memory: float
    """Bytes per node."""
    nvme: float
    """Bytes per node."""
    micro_batch: int
    sequence_length: int
    sequence_parallel: int
    """GPUs that compute each sequence together."""
    recompute: bool
    host_checkpoints: bool
    """Whether inputs of recomputed blocks are stored in host memory."""
    tiled_loss: bool
    """Whether logits and loss are computed in tiles of tokens."""
    accumulates: bool
    """Whether a step has several micro-steps."""
    itemsize: int
    """Bytes per element of parameters and activations: 2 for bf16, 4 for fp32."""
    gathered_itemsize: float
    """Bytes per element of the gathered matrices of blocks: 1 for FP8."""
    reduced_itemsize: int
    """Bytes per element of a reduced gradient."""
    streamed_itemsize: float
    """Bytes per element that a step streams through the GPU; 0 if optimizer states are not offloaded."""
    stays_unsharded: bool
    reduces_in_place: bool
    shards_states: bool
    device_parameters: PerElement
    device_gradients: PerElement
    device_masters: PerElement
    device_states: PerElement
    host_parameters: PerElement
    host_gradients: PerElement
    host_masters_and_states: PerElement
    nvme_parameters: PerElement
    nvme_masters_and_states: PerElement
