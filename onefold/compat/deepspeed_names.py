"""The modules of DeepSpeed that others import, with the origin of each name in them.

Three tables, read by `finder.py`. Paths of DeepSpeed are below `deepspeed`: "runtime.engine" is
`deepspeed.runtime.engine`.

* `MODULES`: modules of `onefold.compat`, and the modules of DeepSpeed that each of them is.
* `NAMES`: names of DeepSpeed's modules that are fetched from other modules when they are read. If `MODULES` has the
  module too, it has these names in addition. A source is a module of `onefold.compat` ("helpers"), a path of DeepSpeed
  with a dot in front (".runtime.engine"; "." is the package itself) or another module ("torch.distributed").
  `new=old` renames.
* `NOT_OFFERED`: features that onefold does not have, and the names of DeepSpeed that stand for them. The names can be
  imported and inherited from, but not used: others import them at the top of their files and often never use them.
"""

from __future__ import annotations

from onefold.compat.constants import CHECKPOINT

MODULES = {
    "accelerator": "accelerator.abstract_accelerator accelerator.real_accelerator",
    "activation_checkpointing": "runtime.activation_checkpointing.checkpointing",
    "checkpoint_files": """
        checkpoint.utils runtime.checkpoint_engine.checkpoint_engine runtime.checkpoint_engine.torch_checkpoint_engine
    """,
    "comm": "comm.comm comm.torch",
    "config": "runtime.config",
    "config_models": """
        monitor.config runtime.config_utils runtime.precision_config runtime.zero.config runtime.zero.leaf_module_config
    """,
    "constants": "checkpoint.constants constants runtime.constants",
    "ds_to_universal": "checkpoint.ds_to_universal",
    "engine": "runtime.engine",
    "git_version_info": "git_version_info",
    "groups": "utils.bwc utils.groups",
    "helpers": """
        runtime.compiler runtime.torch_autocast runtime.utils utils.debug utils.init_on_device utils.module_utils
        utils.nvtx utils.torch
    """,
    "inference": "inference.engine",
    "loss_scaler": "runtime.fp16.loss_scaler",
    "lr_schedules": "runtime.lr_schedules",
    "moe_layer": "moe.layer",
    "moe_utils": "moe.utils",
    "numa": "utils.numa",
    "op_builders": "ops.aio ops.op_builder ops.op_builder.all_ops ops.op_builder.builder",
    "optimizers": "ops.adagrad.cpu_adagrad ops.adam.cpu_adam ops.adam.fused_adam ops.lion.cpu_lion ops.lion.fused_lion",
    "partitioning": "runtime.zero.partition_parameters runtime.zero.utils",
    "rank_logging": "utils.logging",
    "runner": "launcher.runner",
    "state_access": "runtime.zero.offload_states",
    "tiling": "runtime.zero.tiling",
    "timer": "utils.timer",
    "z3_leaf_module": "utils.z3_leaf_module",
    "zero_optimizer": """
        runtime.base_optimizer runtime.bf16_optimizer runtime.fp16.fused_optimizer runtime.fp16.unfused_optimizer
        runtime.zero.parameter_offload
    """,
    "zero_to_fp32": "utils.zero_to_fp32",
    "zero_to_torch": "utils.zero_to_torch",
}

_ACCESS = {
    "onefold.utils": """
        safe_get_full_fp32_param safe_get_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad
        safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state
        safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state
    """,
    "state_access": "safe_get_full_grad safe_get_full_model_grads safe_update_full_grad_vectorized",
}
_LEAF_MODULES = """
    get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name
    set_z3_leaf_modules_by_suffix unset_z3_leaf_module unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter
"""
_ELASTICITY = {
    "elasticity": """
        ElasticityConfigError ElasticityError ElasticityIncompatibleWorldSize compute_elastic_config elasticity_enabled
        ensure_immutable_elastic_config
    """,
}
_TORCH_DISTRIBUTED = """
    Backend P2POp ProcessGroup ReduceOp all_gather all_gather_coalesced all_gather_into_tensor all_gather_object
    all_reduce all_reduce_coalesced all_to_all all_to_all_single barrier batch_isend_irecv broadcast
    broadcast_object_list destroy_process_group gather get_backend get_process_group_ranks get_rank get_world_size
    group irecv is_available is_initialized isend monitored_barrier new_group recv reduce reduce_scatter
    reduce_scatter_tensor scatter send allgather_fn=all_gather_into_tensor inference_all_reduce=all_reduce
    reduce_scatter_fn=reduce_scatter_tensor
"""
NAMES: dict[str, dict[str, str]] = {
    **dict.fromkeys(("elasticity", "elasticity.config", "elasticity.elasticity"), _ELASTICITY),
    "": {
        ".": "dist=comm",
        ".inference.config": "DeepSpeedInferenceConfig",
        ".module_inject": "replace_transformer_layer",
        ".ops.transformer": "DeepSpeedTransformerConfig DeepSpeedTransformerLayer",
        ".pipe": "PipelineModule",
        ".runtime": "zero",
        ".runtime.activation_checkpointing": "checkpointing",
        ".runtime.hybrid_engine": "DeepSpeedHybridEngine",
        ".runtime.pipe.engine": "PipelineEngine",
        ".runtime.tensor_parallel": "tp_model_init",
        "accelerator": "get_accelerator",
        "comm": "init_distributed",
        "config": "DeepSpeedConfig DeepSpeedConfigError",
        "constants": "TORCH_DISTRIBUTED_DEFAULT_PORT",
        "engine": "DeepSpeedEngine initialize",
        "git_version_info": "__git_branch__=git_branch __git_hash__=git_hash git_branch git_hash version",
        "helpers": "OnDevice",
        "inference": "InferenceEngine default_inference_config init_inference",
        "lr_schedules": "add_tuning_arguments",
        "onefold.loader": "DeepSpeedDataLoader=ResumableLoader",
        "onefold.start": "add_config_arguments",
        "rank_logging": "log_dist logger",
        "zero_optimizer": "DeepSpeedOptimizer",
    },
    "accelerator": {
        "accelerator": "DeepSpeedAccelerator get_accelerator is_current_accelerator_supported set_accelerator",
    },
    "checkpoint": {
        ".checkpoint.deepspeed_checkpoint": "DeepSpeedCheckpoint",
        ".checkpoint.zero_checkpoint": "ZeROCheckpoint",
        "checkpoint_files": """
            clone_tensors_for_torch_save get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank
        """,
        "constants": " ".join(CHECKPOINT),
    },
    "comm": {
        "comm": """
            TorchBackend configure get_all_ranks_from_group get_global_rank get_local_rank get_world_group
            get_world_rank_from_launcher get_world_size_from_launcher has_all_gather_into_tensor
            has_all_reduce_coalesced has_coalescing_manager has_reduce_scatter_tensor in_multi_rank_mpi_job
            init_distributed initialize_mesh_device log_summary mpi_discovery single_process_discovery
        """,
        "torch.distributed": _TORCH_DISTRIBUTED,
    },
    "comm.comm": {"torch.distributed": _TORCH_DISTRIBUTED},
    "compression.helper": {"helpers": "recursive_getattr recursive_setattr"},
    "env_report": {"onefold.env_report": "main cli_main=main"},
    "inference": {"inference": "InferenceEngine"},
    "module_inject.layers": {"partitioning": "GatherReplacedLayerParams"},
    "moe.experts": {"moe_layer": "Experts"},
    "moe.sharded_moe": {"moe_gate": "TopKGate", "moe_layer": "MOELayer"},
    "monitor.monitor": {
        "onefold.report.monitors": """
            CometMonitor Monitor=EventWriter MonitorMaster TensorBoardMonitor WandbMonitor csvMonitor=CsvMonitor
        """,
    },
    "ops": {"op_builders": "__compatible_ops__=COMPATIBLE __installed_ops__=COMPATIBLE"},
    "ops.adagrad": {"optimizers": "DeepSpeedCPUAdagrad"},
    "ops.adam": {"optimizers": "DeepSpeedCPUAdam FusedAdam"},
    "ops.lion": {"optimizers": "DeepSpeedCPULion FusedLion"},
    "runtime": {"zero_optimizer": "DeepSpeedOptimizer ZeROOptimizer"},
    "runtime.checkpoint_engine": {
        ".runtime.checkpoint_engine.datastates_checkpoint_engine": "DataStatesCheckpointEngine",
        ".runtime.checkpoint_engine.decoupled_checkpoint_engine": "DecoupledCheckpointEngine",
        ".runtime.checkpoint_engine.fast_checkpoint_engine": "FastCheckpointEngine",
        ".runtime.checkpoint_engine.utils": "create_checkpoint_engine",
        "checkpoint_files": "CheckpointCommitInfo CheckpointEngine TorchCheckpointEngine",
    },
    "runtime.dataloader": {
        "onefold.loader": "DeepSpeedDataLoader=ResumableLoader",
        "onefold.utils": "RepeatingLoader",
    },
    # Names that DeepSpeed's engine imports, and that others import from there.
    "runtime.engine": {
        ".": "dist=comm",
        "moe_gate": "TopKGate",
        "moe_layer": "MoE MOELayer",
        "moe_utils": "is_moe_param",
        ".profiling.flops_profiler": "FlopsProfiler",
        ".runtime.pipe.module": "PipelineModule",
        ".utils": "groups",
        "checkpoint_files": "CheckpointCommitInfo TorchCheckpointEngine",
        "config_models": "OffloadDeviceEnum",
        "helpers": """
            autocast_if_enabled clip_grad_norm_ compiled_autograd is_compile_supported
            split_half_float_double_sparse
        """,
        "onefold.loader": "DeepSpeedDataLoader=ResumableLoader",
        "onefold.report.memory_usage": "see_memory_usage",
        "optimizers": "DeepSpeedCPUAdam FusedAdam",
        "partitioning": "ZeroParamStatus",
        "rank_logging": "log_dist",
        "timer": "SynchronizedWallClockTimer",
        "zero_optimizer": """
            BF16_Optimizer DeepSpeedZeRoOffload DeepSpeedZeroOptimizer DeepSpeedZeroOptimizer_Stage3 FP16_Optimizer
        """,
    },
    "runtime.sequence_parallel.ulysses_sp": {
        "activation_checkpointing": "SequenceTiledCompute TiledMLP sequence_tiled_compute",
        "ulysses": "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter",
    },
    "runtime.sequence_parallel.parallel_state_sp": {"ulysses": "initialize_sequence_parallel"},
    "runtime.swap_tensor": {"constants": "MIN_SWAPPABLE_BYTES"},
    "runtime.utils": {
        "moe_utils": "is_moe_param",
        "onefold.report.memory_usage": "memory_status see_memory_usage",
    },
    "runtime.zero": {
        "config_models": "DeepSpeedZeroConfig",
        "partitioning": """
            GatheredParameters Init MiCS_Init=Init ZeroParamStatus ZeroParamType register_external_parameter
            unregister_external_parameter unwrap_model_for_generation
        """,
        "tiling": "TiledLinear TiledLinearReturnBias",
        "zero_optimizer": "DeepSpeedZeRoOffload",
    },
    "runtime.zero.offload_config": {
        "config_models": """
            DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig OffloadDeviceEnum
        """,
        "onefold.engine.offloaded_states": "OffloadStateTypeEnum",
    },
    "runtime.zero.stage3": {
        "onefold.tools.estimate.model_states": """
            estimate_zero3_model_states_mem_needs_all_cold estimate_zero3_model_states_mem_needs_all_live
        """,
        "partitioning": "GatheredParameters unwrap_model_for_generation",
        "zero_optimizer": "DeepSpeedZeroOptimizer_Stage3 ZeROOptimizer",
    },
    "runtime.zero.stage_1_and_2": {
        "helpers": "split_half_float_double",
        "onefold.tools.estimate.model_states": """
            estimate_zero2_model_states_mem_needs_all_cold estimate_zero2_model_states_mem_needs_all_live
        """,
        "zero_optimizer": "DeepSpeedZeroOptimizer ZeROOptimizer",
    },
    "runtime.zero.tensor_fragment": _ACCESS,
    "utils": {
        **_ACCESS,
        "onefold.utils": f"{_ACCESS['onefold.utils']} {_LEAF_MODULES} RepeatingLoader",
        "helpers": "OnDevice instrument_w_nvtx recursive_getattr recursive_setattr",
        "rank_logging": "log_dist logger set_log_level_from_string",
        "torch.distributed": "is_initialized",
    },
    "utils.tensor_fragment": _ACCESS,
    "utils.z3_leaf_module": {"onefold.utils": _LEAF_MODULES},
    "utils.zero_to_fp32": {
        "onefold.utils.zero_to_fp32": """
            convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint
            load_state_dict_from_zero_checkpoint
        """,
    },
}

# Features that are not offered: their modules, separated by spaces, and the names that others import from these.
NOT_OFFERED: dict[str, dict[str, str]] = {
    "1-bit optimizers": {
        "runtime.fp16.onebit runtime.fp16.onebit.adam runtime.fp16.onebit.lamb runtime.fp16.onebit.zoadam": """
            OnebitAdam OnebitLamb ZeroOneAdam
        """,
    },
    "DeepSpeed's quantized linear layers": {"linear": "OptimizedLinear LoRAConfig QuantizationConfig"},
    "DeepSpeed's transformer kernels": {
        "ops.transformer": """
            DeepSpeedTransformerLayer DeepSpeedTransformerConfig DeepSpeedTransformerInference DeepSpeedInferenceConfig
        """,
    },
    "LAMB (its trust ratio needs whole tensors, and shards are parts of them)": {
        "ops.lamb ops.lamb.fused_lamb": "FusedLamb",
    },
    "a search for a config inside training (`onefold tune` searches before it)": {
        "autotuning autotuning.autotuner": "Autotuner",
    },
    "asynchronous optimizer steps (zenflow)": {
        "ops.adam.zenflow_cpu_adam": "ZenFlowCPUAdam",
        "ops.adam.zenflow_torch_adam": "ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3",
        "runtime.zenflow.zenflow_config": "ZenFlowConfig",
    },
    "other checkpoint engines (engine.save_checkpoint writes; with checkpoint.async in the background)": {
        "runtime.checkpoint_engine.datastates_checkpoint_engine": "DataStatesCheckpointEngine",
        "runtime.checkpoint_engine.decoupled_checkpoint_engine": "DecoupledCheckpointEngine",
        "runtime.checkpoint_engine.fast_checkpoint_engine": "FastCheckpointEngine",
        "runtime.checkpoint_engine.nebula_checkpoint_engine": "NebulaCheckpointEngine",
        "runtime.checkpoint_engine.utils": "create_checkpoint_engine",
    },
    "collectives that compress (zero_quantized_gradients and zero_quantized_weights compress traffic)": {
        "runtime.comm.coalesced_collectives": """
            reduce_scatter_coalesced all_to_all_quant_reduce all_to_all_loco_quant_reduce
        """,
        "runtime.comm.compressed": "CompressedBackend",
        "runtime.comm.mpi": "MpiBackend",
        "runtime.comm.nccl": "NcclBackend",
    },
    "compression": {
        "compression compression.compress": "init_compression redundancy_clean student_initialization",
        "compression.basic_layer": "Embedding_Compress LinearLayer_Compress",
    },
    "compiler passes over a graph (compile the blocks, or call engine.compile)": {
        "compile.passes": "run_opt_passes",
        "compile.passes.offload_adam_states": """
            init_offload_opt_states move_opt_states move_opt_states_sync offload_adam_states_for_init
        """,
    },
    "an elastic agent (start the job with `onefold launch --max-restarts`)": {
        "elasticity elasticity.elastic_agent": "DSElasticAgent",
        "elasticity.config": "ElasticityConfig",
    },
    "dropping layers while training": {"runtime.progressive_layer_drop": "ProgressiveLayerDrop"},
    "estimates of curvature": {"runtime.eigenvalue": "Eigenvalue"},
    "this part of experts (deepspeed.moe.layer.MoE is offered)": {
        "moe.mappings": "drop_tokens gather_tokens",
    },
    "generation inside training by inference kernels": {"runtime.hybrid_engine": "DeepSpeedHybridEngine"},
    "inference kernels": {"inference.config": "DeepSpeedInferenceConfig DeepSpeedTPConfig DeepSpeedMoEConfig"},
    "kernel injection and automatic tensor parallelism": {
        "module_inject module_inject.auto_tp module_inject.layers module_inject.policy": """
            replace_transformer_layer replace_policies ReplaceWithTensorSlicing LinearLayer LinearAllreduce DSPolicy
            HFBertLayerPolicy AutoTP EmbeddingLayer LmHeadLinearAllreduce Normalize OPTEmbedding RMSNormalize
            TensorParallel_Layer TransformerPolicy
        """,
        "module_inject.replace_module": "ReplaceWithTensorSlicing replace_transformer_layer",
        "module_inject.replace_policy": "replace_policies",
    },
    "launchers other than ssh (start `deepspeed --no_ssh` on every node)": {
        "launcher.multinode_runner": """
            MultiNodeRunner PDSHRunner OpenMPIRunner MPICHRunner IMPIRunner SlurmRunner MVAPICHRunner
        """,
    },
    "pipeline parallelism": {
        "pipe runtime.pipe runtime.pipe.module runtime.pipe.topology": """
            PipelineModule LayerSpec TiedLayerSpec ProcessTopology PipelineError PipeDataParallelTopology
            PipeModelDataParallelTopology PipelineParallelGrid
        """,
        "runtime.pipe.engine": "PipelineEngine",
        "runtime.pipe.p2p": "can_send_recv init_process_groups recv recv_obj send send_obj wait",
        "runtime.pipe.schedule": """
            BackwardPass DataParallelSchedule ForwardPass InferenceSchedule LoadMicroBatch OptimizerStep PipeInstruction
            PipeSchedule RecvActivation RecvGrad ReduceGrads ReduceTiedGrads SendActivation SendGrad TrainSchedule
        """,
    },
    "optimizers by hand for Muon (write the optimizer type Muon, or pass torch.optim.Muon with torch.optim.AdamW)": {
        "runtime.zero.muon.muon_optimizer runtime.zero.muon.original_muon": """
            MuonWithAuxAdam Muon SingleDeviceMuon adam_update muon_update
        """,
    },
    "quantization while training": {
        "ops.fp_quantizer runtime.quantize": "FP_Quantize Quantizer",
        "ops.quantizer": "ds_quantizer",
        "runtime.weight_quantizer": "WeightQuantization",
    },
    "random token dropping": {
        "runtime.data_pipeline.data_routing runtime.data_pipeline.data_routing.basic_layer": """
            RandomLayerTokenDrop RandomLTDScheduler
        """,
        "runtime.data_pipeline.data_routing.helper": """
            convert_to_random_ltd remove_random_ltd_state_dict save_without_random_ltd
        """,
        "runtime.data_pipeline.data_routing.scheduler": "RandomLTDScheduler",
    },
    "reshaping of model-parallel checkpoints (any checkpoint of onefold loads on any number of ranks)": {
        "checkpoint.deepspeed_checkpoint": "DeepSpeedCheckpoint",
        "checkpoint.zero_checkpoint": "ZeROCheckpoint",
        "runtime.state_dict_factory": "MegatronSDLoader SDLoaderBase SDLoaderFactory",
    },
    "sampling by difficulty": {
        "runtime.data_pipeline.curriculum_scheduler": "CurriculumScheduler",
        "runtime.data_pipeline.data_sampling runtime.data_pipeline.data_sampling.data_analyzer": """
            DeepSpeedDataSampler DataAnalyzer DistributedDataAnalyzer
        """,
        "runtime.data_pipeline.data_sampling.data_sampler": "DeepSpeedDataSampler",
    },
    "sparse gradients": {"runtime.sparse_tensor": "SparseTensor"},
    "sample files of token ids": {
        "runtime.data_pipeline.data_sampling.indexed_dataset": "MMapIndexedDataset MMapIndexedDatasetBuilder",
    },
    "this part of sequence parallelism": {
        "runtime.sequence_parallel.ulysses_sp": """
            UlyssesSPAttention TiledFusedLogitsLoss
        """,
        "sequence.cross_entropy": "vocab_sequence_parallel_cross_entropy",
        "sequence.fpdt_layer": "FPDT_Attention FPDT_FFN FPDT_InputConstruct FPDT_LogitsLoss SequenceChunk",
        "sequence.layer": "DistributedAttention",
    },
    "sparse attention kernels": {
        "ops.sparse_attention ops.sparse_attention.sparsity_config": """
            BertSparseSelfAttention BigBirdSparsityConfig BSLongformerSparsityConfig DenseSparsityConfig
            FixedSparsityConfig LocalSlidingWindowSparsityConfig MatMul Softmax SparseAttentionUtils SparseSelfAttention
            SparsityConfig VariableSparsityConfig
        """,
    },
    "tensor parallelism": {"runtime.tensor_parallel": "tp_model_init TpTrainingManager get_tensor_parallel_config"},
    "the flops profiler (onefold.Profiling times a loop)": {
        "profiling.flops_profiler profiling.flops_profiler.profiler": "FlopsProfiler get_model_profile",
    },
    "the kernels of DeepSpeed4Science": {"ops.deepspeed4science": "DS4Sci_EvoformerAttention EvoformerFusedAttention"},
    "the internals of DeepSpeed's stage 3 (onefold.zero.GatheredParameters gathers, the engine prefetches)": {
        "runtime.swap_tensor.partitioned_param_swapper": "AsyncPartitionedParameterSwapper PartitionedParamStatus",
        "runtime.zero.contiguous_memory_allocator": "ContiguousMemoryAllocator",
        "runtime.zero.linear": "LinearFunctionForZeroStage3 LinearModuleForZeroStage3 zero3_linear_wrap",
        "runtime.zero.partitioned_param_coordinator": """
            InflightParamRegistry PartitionedParameterCoordinator PrefetchCoordinator ZeRoTraceMode debug_rank0
            get_all_parameters iter_params
        """,
        "runtime.zero.partitioned_param_profiler": "PartitionedParameterProfiler",
    },
}
