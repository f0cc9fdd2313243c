"""The case that the page computes: a model, a machine and a setting."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A decoder of equal blocks, the nodes that train it with Adam, and the setting."""

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
    shards_parameters: bool
    shards_gradients: bool
    shards_states: bool
    offload_optimizer: str
    """none, cpu or nvme, as in a config."""
    offload_param: str
    """none, cpu or nvme, as in a config."""
    micro_batch: int
    sequence_length: int
    recompute: bool
    itemsize: int
    """Bytes per element of parameters and activations: 2 for bf16, 4 for fp32."""
    accumulates: bool
    """Whether a step has several micro-steps."""
    state_itemsize: float
    """Bytes per element of moments: 4 for fp32; for int8, with its share of a scale."""
    master_rest: float
    """Bytes per element of a split master in addition to the bf16 weight; 0: masters are fp32."""
