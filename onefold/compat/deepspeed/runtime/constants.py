"""Names of config keys."""

from __future__ import annotations

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
