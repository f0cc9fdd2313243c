"""Names of DeepSpeed that stand for something else than ZeRO: they can be imported and inherited from, not used.

Others import them at the top of their files and often never use them. Their modules are made from one table.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

_PREFIX = "onefold.compat.deepspeed."

# What is not offered: its modules, and the names of them that others import.
_NOT_OFFERED: dict[str, dict[str, list[str]]] = {
    "1-bit optimizers": {
        "runtime.fp16.onebit.adam": ["OnebitAdam"],
        "runtime.fp16.onebit.lamb": ["OnebitLamb"],
        "runtime.fp16.onebit.zoadam": ["ZeroOneAdam"],
    },
    "DeepSpeed's quantized linear layers": {
        "linear": ["OptimizedLinear", "LoRAConfig", "QuantizationConfig"],
    },
    "DeepSpeed's transformer kernels": {
        "ops.transformer": [
            "DeepSpeedTransformerLayer",
            "DeepSpeedTransformerConfig",
            "DeepSpeedTransformerInference",
            "DeepSpeedInferenceConfig",
        ],
    },
    "LAMB (its trust ratio needs whole tensors, and shards are parts of them)": {
        "ops.lamb": ["FusedLamb"],
    },
    "a search for a config by running many": {
        "autotuning": ["Autotuner"],
    },
    "compression": {
        "compression": ["init_compression", "redundancy_clean", "student_initialization"],
    },
    "dropping layers while training": {
        "runtime.progressive_layer_drop": ["ProgressiveLayerDrop"],
    },
    "estimates of curvature": {
        "runtime.eigenvalue": ["Eigenvalue"],
    },
    "expert-parallel layers (models of experts train as they are, with set_z3_leaf_modules)": {
        "moe.experts": ["Experts"],
        "moe.layer": ["MoE"],
        "moe.sharded_moe": ["MOELayer", "TopKGate"],
    },
    "generation inside training by inference kernels": {
        "runtime.hybrid_engine": ["DeepSpeedHybridEngine"],
    },
    "inference kernels": {
        "inference.config": ["DeepSpeedInferenceConfig", "DeepSpeedTPConfig", "DeepSpeedMoEConfig"],
    },
    "kernel injection and automatic tensor parallelism": {
        "module_inject": [
            "replace_transformer_layer",
            "replace_policies",
            "ReplaceWithTensorSlicing",
            "LinearLayer",
            "LinearAllreduce",
            "DSPolicy",
            "HFBertLayerPolicy",
        ],
    },
    "launchers other than ssh (start `deepspeed --no_ssh` on every node)": {
        "launcher.multinode_runner": [
            "MultiNodeRunner",
            "PDSHRunner",
            "OpenMPIRunner",
            "MPICHRunner",
            "IMPIRunner",
            "SlurmRunner",
            "MVAPICHRunner",
        ],
    },
    "pipeline parallelism": {
        "pipe": ["PipelineModule", "LayerSpec", "TiedLayerSpec"],
        "runtime.pipe": ["PipelineModule", "LayerSpec", "TiedLayerSpec"],
        "runtime.pipe.engine": ["PipelineEngine"],
        "runtime.pipe.module": ["PipelineModule", "LayerSpec", "TiedLayerSpec"],
        "runtime.pipe.topology": [
            "PipeDataParallelTopology",
            "PipeModelDataParallelTopology",
            "PipelineParallelGrid",
            "ProcessTopology",
        ],
    },
    "quantization while training": {
        "runtime.quantize": ["Quantizer"],
    },
    "random token dropping": {
        "runtime.data_pipeline.data_routing": ["RandomLayerTokenDrop", "RandomLTDScheduler"],
    },
    "sampling by difficulty": {
        "runtime.data_pipeline.data_sampling": ["DeepSpeedDataSampler", "DataAnalyzer"],
    },
    "sample files of token ids": {
        "runtime.data_pipeline.data_sampling.indexed_dataset": ["MMapIndexedDataset", "MMapIndexedDatasetBuilder"],
    },
    "sequence parallelism": {
        "runtime.sequence_parallel.parallel_state_sp": ["initialize_sequence_parallel"],
        "runtime.sequence_parallel.ulysses_sp": [
            "UlyssesSPAttentionHF",
            "UlyssesSPDataLoaderAdapter",
            "UlyssesSPAttention",
            "TiledMLP",
            "SequenceTiledCompute",
            "TiledFusedLogitsLoss",
            "sequence_tiled_compute",
        ],
        "sequence.cross_entropy": ["vocab_sequence_parallel_cross_entropy"],
        "sequence.layer": ["DistributedAttention"],
    },
    "sparse attention kernels": {
        "ops.sparse_attention": [
            "SparseSelfAttention",
            "SparsityConfig",
            "FixedSparsityConfig",
            "BigBirdSparsityConfig",
            "SparseAttentionUtils",
        ],
    },
    "tensor parallelism": {
        "runtime.tensor_parallel": ["tp_model_init", "TpTrainingManager", "get_tensor_parallel_config"],
    },
    "the flops profiler (onefold.Profiling times a loop)": {
        "profiling.flops_profiler": ["FlopsProfiler", "get_model_profile"],
    },
}
TABLE = {module: (what, listed) for what, modules in _NOT_OFFERED.items() for module, listed in modules.items()}


class NotOffered:
    """Raises when it is made or called, and says what it stands for."""

    what = "this part of DeepSpeed"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            f"{type(self).__name__}: onefold does not offer {self.what}; it does ZeRO data parallelism. "
            "A script that needs it has to run with DeepSpeed itself"
        )


class _Finder(MetaPathFinder):
    """Finds the modules of the table, and the packages above them that have no file of their own."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        name = fullname.removeprefix(_PREFIX)
        is_package = any(module.startswith(f"{name}.") for module in TABLE)
        if name == fullname or not (name in TABLE or is_package):
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(), origin=__file__, is_package=is_package)


class _Loader(Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None  # a plain module

    def exec_module(self, module: ModuleType) -> None:
        what, listed = TABLE.get(module.__name__.removeprefix(_PREFIX), ("this part of DeepSpeed", []))
        module.__doc__ = f"Not offered: {what}."
        for name in listed:
            setattr(module, name, type(name, (NotOffered,), {"what": what, "__module__": module.__name__}))


def find_modules() -> None:
    """Make the modules of the table importable. Asked last, after the files."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
