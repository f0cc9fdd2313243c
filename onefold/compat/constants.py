"""DeepSpeed's constants: names of config keys, of what its checkpoint files hold, and of environment variables."""

from __future__ import annotations

import os
from datetime import timedelta

# -- deepspeed.constants -----------------------------------------------------------------------------------------------

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
default_pg_timeout = timedelta(minutes=int(os.getenv("DEEPSPEED_TIMEOUT", "30")))
INFERENCE_GENERIC_MODE = "generic"
INFERENCE_SPECIALIZED_MODE = "specialized"
CROSS_RANK = "CROSS_RANK"
CROSS_SIZE = "CROSS_SIZE"
LOCAL_RANK = "LOCAL_RANK"

# -- deepspeed.runtime.constants ---------------------------------------------------------------------------------------

ROUTE_TRAIN, ROUTE_EVAL, ROUTE_PREDICT, ROUTE_ENCODE = "train", "eval", "predict", "encode"
TRAIN_BATCH_SIZE = "train_batch_size"
TRAIN_MICRO_BATCH_SIZE_PER_GPU = "train_micro_batch_size_per_gpu"
GRADIENT_ACCUMULATION_STEPS = "gradient_accumulation_steps"
GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT = "gradient_clipping", 1.0
OPTIMIZER, SCHEDULER, TYPE = "optimizer", "scheduler", "type"
OPTIMIZER_PARAMS = SCHEDULER_PARAMS = "params"
MAX_GRAD_NORM = "max_grad_norm"
ZERO_OPTIMIZATION = "zero_optimization"
ZERO_ALLOW_UNTESTED_OPTIMIZER = "zero_allow_untested_optimizer"
STEPS_PER_PRINT = "steps_per_print"
BFLOAT16, BFLOAT16_OLD, FP16 = "bf16", "bfloat16", "fp16"
COMMUNICATION_DATA_TYPE = "communication_data_type"
PRESCALE_GRADIENTS = "prescale_gradients"
GRADIENT_PREDIVIDE_FACTOR = "gradient_predivide_factor"
DATA_TYPES, GRAD_ACCUM_DTYPE = "data_types", "grad_accum_dtype"
DATA_PARALLEL_GROUP = "data_parallel_group"
GLOBAL_RANK = "global_rank"

# -- deepspeed.runtime.swap_tensor -------------------------------------------------------------------------------------

MIN_SWAPPABLE_BYTES = 1024 * 1024
"""Smaller tensors stay in memory with DeepSpeed. onefold writes flat parameters, whatever their size."""

# -- deepspeed.checkpoint.constants ------------------------------------------------------------------------------------

# Keys whose value is their name in lower case.
_KEYS = """
    OPTIMIZER_STATE_DICT FP32_GROUPS FP32_FLAT_GROUPS BASE_OPTIMIZER_STATE BASE_OPTIMIZER_STATE_STEP
    SINGLE_PARTITION_OF_FP32_GROUPS PARAM_GROUPS GROUP_PADDINGS PARTITION_COUNT ZERO_STAGE CLIP_GRAD LOSS_SCALER PARAM
    PARAM_SHAPES BUFFER_NAMES FROZEN_PARAM_SHAPES FROZEN_PARAM_FRAGMENTS VOCAB_TENSOR PADDED_VOCAB_SIZE
    ORIGINAL_VOCAB_SIZE PARAM_SLICE_MAPPINGS CAT_DIM PARAM_N_SUB_PARAMS SUB_PARAM_SHAPE VOCABULARY_PARAMETER_PATTERNS
    PIPELINE_REPLICATED_PARAMETER_PATTERNS PARAMETER_TO_AVERAGE_PATTERNS PARAMETER_WITH_ROW_PARALLELISM_PATTERNS
    TP_REPLICATED_PARAMETER_PATTERNS PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 PARAMETER_WITH_SUB_PARAMS SUB_PARAMS_SHAPE
    DS_VERSION UNIVERSAL_CHECKPOINT_INFO
""".split()  # noqa: SIM905
CHECKPOINT: dict[str, str | float] = {
    "FP32_WEIGHT_KEY": "fp32",
    "MODEL_FILE_PREFIX": "mp_rank_",
    "ZERO_FILE_PREFIX": "zero_pp_rank_",
    "OPTIM_FILE_SUFFIX": "_optim_states.pt",
    "MODEL_FILE_SUFFIX": "_model_states.pt",
    "LAYER_FILE_PREFIX": "layer_",
    "BF16_ZERO_FILE_PREFIX": "bf16_zero_pp_rank_",
    "FP16_ZERO_FILE_PREFIX": "fp16_zero_pp_rank_",
    "UNIVERSAL_CHECKPOINT_VERSION_KEY": "universal_checkpoint_version",
    "UNIVERSAL_CHECKPOINT_VERSION_VALUE": 0.4,
    **{name: name.lower() for name in _KEYS},
}
globals().update(CHECKPOINT)
