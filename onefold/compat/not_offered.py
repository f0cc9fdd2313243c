"""Names of DeepSpeed that stand for something else than ZeRO: they can be imported and inherited from, not used.

Others import them at the top of their files and often never use them. Their modules are made from one table. A second
table has the modules whose names live elsewhere in onefold or in torch.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

from onefold.compat.lazy import names, same

_PREFIX = "onefold.compat.deepspeed."

# What is not offered: its modules, and the names of them that others import.
_NOT_OFFERED: dict[str, dict[str, list[str]]] = {
    "1-bit optimizers": {
        "runtime.fp16.onebit": ["OnebitAdam", "OnebitLamb", "ZeroOneAdam"],
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
        "ops.lamb.fused_lamb": ["FusedLamb"],
    },
    "a search for a config inside training (`onefold tune` searches before it)": {
        "autotuning": ["Autotuner"],
        "autotuning.autotuner": ["Autotuner"],
    },
    "asynchronous optimizer steps (zenflow)": {
        "ops.adam.zenflow_cpu_adam": ["ZenFlowCPUAdam"],
        "ops.adam.zenflow_torch_adam": ["ZenFlowSelectiveAdamW", "ZenFlowSelectiveAdamW_stage3"],
        "runtime.zenflow.zenflow_config": ["ZenFlowConfig"],
    },
    "other checkpoint engines (engine.save_checkpoint writes; with checkpoint.async in the background)": {
        "runtime.checkpoint_engine.datastates_checkpoint_engine": ["DataStatesCheckpointEngine"],
        "runtime.checkpoint_engine.decoupled_checkpoint_engine": ["DecoupledCheckpointEngine"],
        "runtime.checkpoint_engine.fast_checkpoint_engine": ["FastCheckpointEngine"],
        "runtime.checkpoint_engine.nebula_checkpoint_engine": ["NebulaCheckpointEngine"],
        "runtime.checkpoint_engine.utils": ["create_checkpoint_engine"],
    },
    "collectives that compress (zero_quantized_gradients and zero_quantized_weights compress traffic)": {
        "runtime.comm.coalesced_collectives": [
            "reduce_scatter_coalesced",
            "all_to_all_quant_reduce",
            "all_to_all_loco_quant_reduce",
        ],
        "runtime.comm.compressed": ["CompressedBackend"],
        "runtime.comm.mpi": ["MpiBackend"],
        "runtime.comm.nccl": ["NcclBackend"],
    },
    "compression": {
        "compression": ["init_compression", "redundancy_clean", "student_initialization"],
        "compression.basic_layer": ["Embedding_Compress", "LinearLayer_Compress"],
        "compression.compress": ["init_compression", "redundancy_clean", "student_initialization"],
    },
    "compiler passes over a graph (compile the blocks, or call engine.compile)": {
        "compile.passes": ["run_opt_passes"],
        "compile.passes.offload_adam_states": [
            "init_offload_opt_states",
            "move_opt_states",
            "move_opt_states_sync",
            "offload_adam_states_for_init",
        ],
    },
    "elastic batch sizes (any checkpoint loads on any number of ranks: set the batch keys for the new number)": {
        "elasticity": [
            "compute_elastic_config",
            "elasticity_enabled",
            "ensure_immutable_elastic_config",
            "DSElasticAgent",
            "ElasticityConfig",
            "ElasticityConfigError",
            "ElasticityError",
        ],
        "elasticity.config": ["ElasticityConfig", "ElasticityConfigError", "ElasticityError"],
        "elasticity.elasticity": ["compute_elastic_config", "elasticity_enabled"],
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
        "moe.mappings": ["drop_tokens", "gather_tokens"],
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
        "module_inject.auto_tp": ["AutoTP", "ReplaceWithTensorSlicing"],
        "module_inject.layers": [
            "EmbeddingLayer",
            "LinearAllreduce",
            "LinearLayer",
            "LmHeadLinearAllreduce",
            "Normalize",
            "OPTEmbedding",
            "RMSNormalize",
            "TensorParallel_Layer",
        ],
        "module_inject.policy": ["DSPolicy", "TransformerPolicy"],
        "module_inject.replace_module": ["ReplaceWithTensorSlicing", "replace_transformer_layer"],
        "module_inject.replace_policy": ["replace_policies"],
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
        "runtime.pipe": ["PipelineModule", "LayerSpec", "ProcessTopology", "TiedLayerSpec"],
        "runtime.pipe.engine": ["PipelineEngine"],
        "runtime.pipe.module": ["PipelineError", "PipelineModule", "LayerSpec", "TiedLayerSpec"],
        "runtime.pipe.p2p": ["can_send_recv", "init_process_groups", "recv", "recv_obj", "send", "send_obj", "wait"],
        "runtime.pipe.schedule": [
            "BackwardPass",
            "DataParallelSchedule",
            "ForwardPass",
            "InferenceSchedule",
            "LoadMicroBatch",
            "OptimizerStep",
            "PipeInstruction",
            "PipeSchedule",
            "RecvActivation",
            "RecvGrad",
            "ReduceGrads",
            "ReduceTiedGrads",
            "SendActivation",
            "SendGrad",
            "TrainSchedule",
        ],
        "runtime.pipe.topology": [
            "PipeDataParallelTopology",
            "PipeModelDataParallelTopology",
            "PipelineParallelGrid",
            "ProcessTopology",
        ],
    },
    "optimizers by hand for Muon (write the optimizer type Muon, or pass torch.optim.Muon with torch.optim.AdamW)": {
        "runtime.zero.muon.muon_optimizer": ["MuonWithAuxAdam"],
        "runtime.zero.muon.original_muon": [
            "Muon",
            "MuonWithAuxAdam",
            "SingleDeviceMuon",
            "adam_update",
            "muon_update",
        ],
    },
    "quantization while training": {
        "ops.fp_quantizer": ["FP_Quantize", "Quantizer"],
        "ops.quantizer": ["ds_quantizer"],
        "runtime.quantize": ["Quantizer"],
        "runtime.weight_quantizer": ["WeightQuantization"],
    },
    "random token dropping": {
        "runtime.data_pipeline.data_routing": ["RandomLayerTokenDrop", "RandomLTDScheduler"],
        "runtime.data_pipeline.data_routing.basic_layer": ["RandomLayerTokenDrop"],
        "runtime.data_pipeline.data_routing.helper": [
            "convert_to_random_ltd",
            "remove_random_ltd_state_dict",
            "save_without_random_ltd",
        ],
        "runtime.data_pipeline.data_routing.scheduler": ["RandomLTDScheduler"],
    },
    "reshaping of model-parallel checkpoints (any checkpoint of onefold loads on any number of ranks)": {
        "checkpoint.deepspeed_checkpoint": ["DeepSpeedCheckpoint"],
        "checkpoint.zero_checkpoint": ["ZeROCheckpoint"],
        "runtime.state_dict_factory": ["MegatronSDLoader", "SDLoaderBase", "SDLoaderFactory"],
    },
    "sampling by difficulty": {
        "runtime.data_pipeline.curriculum_scheduler": ["CurriculumScheduler"],
        "runtime.data_pipeline.data_sampling": ["DeepSpeedDataSampler", "DataAnalyzer"],
        "runtime.data_pipeline.data_sampling.data_analyzer": ["DataAnalyzer", "DistributedDataAnalyzer"],
        "runtime.data_pipeline.data_sampling.data_sampler": ["DeepSpeedDataSampler"],
    },
    "sparse gradients": {
        "runtime.sparse_tensor": ["SparseTensor"],
    },
    "sample files of token ids": {
        "runtime.data_pipeline.data_sampling.indexed_dataset": ["MMapIndexedDataset", "MMapIndexedDatasetBuilder"],
    },
    "sequence parallelism": {
        "runtime.sequence_parallel.parallel_state_sp": ["initialize_sequence_parallel"],
        "runtime.sequence_parallel.ulysses_sp": [
            "UlyssesSPDataLoaderAdapter",
            "UlyssesSPAttention",
            "SequenceTiledCompute",
            "TiledFusedLogitsLoss",
            "sequence_tiled_compute",
        ],
        "sequence.cross_entropy": ["vocab_sequence_parallel_cross_entropy"],
        "sequence.fpdt_layer": [
            "FPDT_Attention",
            "FPDT_FFN",
            "FPDT_InputConstruct",
            "FPDT_LogitsLoss",
            "SequenceChunk",
        ],
        "sequence.layer": ["DistributedAttention"],
    },
    "sparse attention kernels": {
        "ops.sparse_attention": [
            "BertSparseSelfAttention",
            "BigBirdSparsityConfig",
            "BSLongformerSparsityConfig",
            "DenseSparsityConfig",
            "FixedSparsityConfig",
            "LocalSlidingWindowSparsityConfig",
            "MatMul",
            "Softmax",
            "SparseAttentionUtils",
            "SparseSelfAttention",
            "SparsityConfig",
            "VariableSparsityConfig",
        ],
        "ops.sparse_attention.sparsity_config": [
            "BigBirdSparsityConfig",
            "BSLongformerSparsityConfig",
            "DenseSparsityConfig",
            "FixedSparsityConfig",
            "LocalSlidingWindowSparsityConfig",
            "SparsityConfig",
            "VariableSparsityConfig",
        ],
    },
    "tensor parallelism": {
        "runtime.tensor_parallel": ["tp_model_init", "TpTrainingManager", "get_tensor_parallel_config"],
    },
    "the flops profiler (onefold.Profiling times a loop)": {
        "profiling.flops_profiler": ["FlopsProfiler", "get_model_profile"],
        "profiling.flops_profiler.profiler": ["FlopsProfiler", "get_model_profile"],
    },
    "the kernels of DeepSpeed4Science": {
        "ops.deepspeed4science": ["DS4Sci_EvoformerAttention", "EvoformerFusedAttention"],
    },
    "the internals of DeepSpeed's stage 3 (onefold.zero.GatheredParameters gathers, the engine prefetches)": {
        "runtime.swap_tensor.partitioned_param_swapper": ["AsyncPartitionedParameterSwapper", "PartitionedParamStatus"],
        "runtime.zero.contiguous_memory_allocator": ["ContiguousMemoryAllocator"],
        "runtime.zero.linear": ["LinearFunctionForZeroStage3", "LinearModuleForZeroStage3", "zero3_linear_wrap"],
        "runtime.zero.partitioned_param_coordinator": [
            "InflightParamRegistry",
            "PartitionedParameterCoordinator",
            "PrefetchCoordinator",
            "ZeRoTraceMode",
            "debug_rank0",
            "get_all_parameters",
            "iter_params",
        ],
        "runtime.zero.partitioned_param_profiler": ["PartitionedParameterProfiler"],
    },
}
TABLE = {module: (what, listed) for what, modules in _NOT_OFFERED.items() for module, listed in modules.items()}

_D = "onefold.compat.deepspeed"
_CHECKPOINT_ENGINES = f"{_D}.runtime.checkpoint_engine"
# Modules, whole or in part, whose names live elsewhere.
ELSEWHERE: dict[str, dict[str, str]] = {
    "compression.helper": same(f"{_D}.utils.module_utils", "recursive_getattr", "recursive_setattr"),
    "module_inject.layers": same(__name__, "GatherReplacedLayerParams"),
    "runtime.checkpoint_engine.checkpoint_engine": same(
        f"{_CHECKPOINT_ENGINES}.torch_checkpoint_engine", "CheckpointCommitInfo", "CheckpointEngine"
    ),
    "runtime.sequence_parallel.ulysses_sp": same(__name__, "TiledMLP", "UlyssesSPAttentionHF"),
    "runtime.zero.leaf_module_config": same(
        f"{_D}.runtime.zero.config",
        "DEFAULT_LEAF_MODULE_CLASSES",
        "DEFAULT_LEAF_MODULE_NAMES",
        "DEFAULT_LEAF_MODULE_NAME_SUFFIXES",
        "DeepSpeedZeroLeafModuleConfig",
    ),
}


class NotOfferedError(NotImplementedError, AttributeError):
    """Using a name that is not offered. `hasattr` and `getattr` with a default see that the attribute is missing."""


class _Explained(type):
    """The class of names that are not offered: their attributes are not offered either."""

    what: str

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        raise NotOfferedError(explain(f"{cls.__name__}.{name}", cls.what))


class NotOffered(metaclass=_Explained):
    """Raises when it is made or called, or when an attribute is read, and says what it stands for."""

    what = "this part of DeepSpeed"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotOfferedError(explain(type(self).__name__, self.what))


def explain(name: str, what: str) -> str:
    """Return the message for the use of a name that is not offered."""
    return f"{name}: onefold does not support {what}. Run scripts that need it with DeepSpeed itself."


_made: dict[tuple[str, str], type] = {}


def _class_of(name: str, what: str, module: str) -> type:
    """Return the class that stands for a name; the same class in every module that has the name."""
    if (name, what) not in _made:
        bases = (NotOffered, Exception) if name.endswith("Error") else (NotOffered,)
        _made[name, what] = _Explained(name, bases, {"what": what, "__module__": module})
    return _made[name, what]


class UlyssesSPAttentionHF(NotOffered):
    """Sequence parallelism. Tools also register a size of 1, which means that there is none."""

    what = "sequence parallelism"

    @classmethod
    def register_with_transformers(
        cls, model_name_or_path: Any, core_attn_implementation: str, sequence_parallel_size: int, *_: Any, **__: Any
    ) -> None:
        if sequence_parallel_size != 1:
            what = f"{cls.what} (sequence_parallel_size = {sequence_parallel_size})"
            raise NotOfferedError(explain(f"{cls.__name__}.register_with_transformers", what))


class TiledMLP:
    """A layer that works on a part of the sequence at a time: its activations are computed again for each part."""

    @staticmethod
    def apply(fn: Callable[[Any, Any], Any], module: Any, x: Any, shards: int, compute_params: Any = None) -> Any:
        """Return `fn(module, x)` for a function of each position, in parts of `x` along its second dimension."""
        import torch

        from onefold.compat.deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint

        return torch.cat([checkpoint(fn, module, part) for part in x.chunk(shards, dim=1)], dim=1)


class GatherReplacedLayerParams(AbstractContextManager[None]):
    """Do nothing: no layer is replaced by a tensor-parallel one, so no parameter is gathered over such ranks."""

    def __init__(self, params: Any, module: Any, enabled: bool = True) -> None:
        self.params, self.module, self.enabled = params, module, False

    def __exit__(self, *error: object) -> None:
        return None


class _Finder(MetaPathFinder):
    """Finds the modules of the tables, and the packages above them that have no file of their own."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        name = fullname.removeprefix(_PREFIX)
        is_package = any(module.startswith(f"{name}.") for module in (*TABLE, *ELSEWHERE))
        if name == fullname or not (name in TABLE or name in ELSEWHERE or is_package):
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(), origin=__file__, is_package=is_package)


class _Loader(Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None  # a plain module

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.removeprefix(_PREFIX)
        what, listed = TABLE.get(name, ("this part of DeepSpeed", []))
        module.__doc__ = f"Not offered: {what}." if listed else "Names that live in other modules."
        for each in listed:
            setattr(module, each, _class_of(each, what, module.__name__))
        vars(module)["__getattr__"], vars(module)["__dir__"] = names(module.__name__, ELSEWHERE.get(name, {}))


def find_modules() -> None:
    """Make the modules of the tables importable. Asked last, after the files."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
