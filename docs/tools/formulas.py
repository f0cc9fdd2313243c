"""Memory of a run as formulas of a few numbers: the arithmetic of the page `docs/what-fits.html`.

[Note: one formula, two languages]
These functions are written in Python only, and `to_javascript` translates them to the page's script. So they are plain:
numbers and flags of a `Case`, local names, sums and products, comparisons, conditional expressions, and calls of each
other. Bytes of model states per element come from the plan (`planned_states.py`). The formulas add activations and
buffers; tests compare them with dry runs of a step, which are exact where these formulas approximate.

[Note: the peak]
After the loss, all activations and the logits are held. In the backward of the last block, its temporaries and the
first gradients are held in addition, and the logits are freed. At the end of backward, all gradients are held and
almost no activations; in between, both change in proportion. Stage 0 then gathers gradients for its step.
"""

from __future__ import annotations

from case import Case, PerElement

from onefold.config import Config
from onefold.offload.grad_offload import COPIES_IN_FLIGHT
from onefold.optim.gpu_stream import CHUNK_BYTES, IN_FLIGHT
from onefold.optim.pipeline import TILE
from onefold.tiled_loss import MIN_TOKENS, TILE_BYTES
from onefold.tools.estimate.forecast import CONTEXT, FRAGMENTATION, HOST_SHARE, MARGIN, NCCL, PROCESS, WORKSPACE

_DEFAULTS = Config().zero_optimization
PREFETCH = _DEFAULTS.stage3_prefetch_bucket_size
MAX_LIVE = _DEFAULTS.stage3_max_live_parameters
MAX_REUSE = _DEFAULTS.stage3_max_reuse_distance
REDUCE_BUCKET = _DEFAULTS.reduce_bucket_size
TILE_ELEMENTS = TILE["cuda"]
INPUTS_ON_DEVICE = 2
MAX_IN_CPU = _DEFAULTS.offload_param.max_in_cpu


# -- shape -------------------------------------------------------------------------------------------------------------


def world(case: Case) -> float:
    return case.gpus * case.nodes


def block_weights(case: Case) -> float:
    """Return the elements of the matrices of a block."""
    key_value = 2 * case.hidden * case.kv_heads * (case.hidden / case.heads)
    return 2 * case.hidden * case.hidden + key_value + (3 if case.gated else 2) * case.hidden * case.ffn


def norm_weights(case: Case) -> float:
    """Return the elements of all norms."""
    return (2 * case.layers + 1) * case.hidden


def table_weights(case: Case) -> float:
    """Return the elements of the embedding, which the head has, too."""
    return case.vocabulary * case.hidden


def head_weights(case: Case) -> float:
    """Return the elements of a head that is not tied to the embedding."""
    return 0 if case.tied else table_weights(case)


def num_parameters(case: Case) -> float:
    return case.layers * block_weights(case) + norm_weights(case) + table_weights(case) + head_weights(case)


# -- model states ------------------------------------------------------------------------------------------------------


def elements_in_cpu(case: Case) -> float:
    """Return the elements of whole units within `max_in_cpu`: all, or the embedding and the first blocks."""
    room = MAX_IN_CPU * world(case)
    blocks = min(case.layers, (room - table_weights(case)) // block_weights(case))
    some = table_weights(case) + blocks * block_weights(case) if table_weights(case) <= room else 0
    return num_parameters(case) if num_parameters(case) <= room else some


def stored(case: Case, of: PerElement) -> float:
    """Return the bytes of one rank."""
    in_cpu = elements_in_cpu(case)
    rest = num_parameters(case) - in_cpu
    return in_cpu * (of.in_cpu + of.in_cpu_sharded / world(case)) + rest * (of.rest + of.rest_sharded / world(case))


def stored_parameters(case: Case) -> float:
    return stored(case, case.device_parameters)


def masters(case: Case) -> float:
    return stored(case, case.device_masters)


def moments(case: Case) -> float:
    return stored(case, case.device_states)


def gradient_bytes(case: Case) -> float:
    """Return the bytes of gradients in any tier at the end of backward."""
    return stored(case, case.device_gradients) + stored(case, case.host_gradients)


def host_parameters(case: Case) -> float:
    """Return the host bytes of parameters of a node."""
    return case.gpus * stored(case, case.host_parameters)


def host_gradients(case: Case) -> float:
    return case.gpus * stored(case, case.host_gradients)


def host_states(case: Case) -> float:
    return case.gpus * stored(case, case.host_masters_and_states)


def host_processes(case: Case) -> float:
    return case.gpus * PROCESS


def host_bytes(case: Case) -> float:
    states = host_parameters(case) + host_gradients(case) + host_states(case)
    return states + host_activations(case) + host_processes(case)


def host_room(case: Case) -> float:
    """Return the host memory that a job may use."""
    return case.host_memory * HOST_SHARE


def nvme_parameters(case: Case) -> float:
    return case.gpus * stored(case, case.nvme_parameters)


def nvme_states(case: Case) -> float:
    return case.gpus * stored(case, case.nvme_masters_and_states)


def nvme_bytes(case: Case) -> float:
    return nvme_parameters(case) + nvme_states(case)


# -- gathered parameters -----------------------------------------------------------------------------------------------


def blocks_kept(case: Case) -> float:
    """Return the blocks that stay unsharded from forward to backward, by reuse distance and memory limit."""
    near = max(0, -(-(MAX_REUSE / 2 - head_weights(case)) // block_weights(case)))
    room = max(0, (MAX_LIVE - table_weights(case)) // block_weights(case))
    return min(case.layers, near, room)


def blocks_ahead(case: Case) -> float:
    """Return the blocks that are prefetched, in addition to those that stay unsharded."""
    wanted = -(-PREFETCH // block_weights(case))
    live = table_weights(case) + blocks_kept(case) * block_weights(case)
    room = max(0, (MAX_LIVE - live) // block_weights(case))
    return min(case.layers - blocks_kept(case), wanted, room)


def gathered_bytes(case: Case, of_tables: float, of_blocks: float) -> float:
    """Return the bytes of gathered elements of the embedding, and of blocks."""
    gathered = case.itemsize * of_tables + case.gathered_itemsize * of_blocks
    return 0 if case.stays_unsharded else gathered


def gathered_at_loss(case: Case) -> float:
    blocks = (blocks_kept(case) + blocks_ahead(case)) * block_weights(case)
    return gathered_bytes(case, table_weights(case), blocks)


def gathered_in_backward(case: Case) -> float:
    """Return the bytes in backward. The head is resharded, unless it is tied to the embedding."""
    blocks = max(1, blocks_kept(case) + blocks_ahead(case)) * block_weights(case)
    return gathered_bytes(case, table_weights(case) if case.tied else 0, blocks)


def gathered_at_end(case: Case) -> float:
    """Return the bytes at the end of backward: the first two blocks, if the limit allows both."""
    blocks = min(2, case.layers) if 2 * block_weights(case) <= MAX_LIVE else 1
    return gathered_bytes(case, table_weights(case) if case.tied else 0, blocks * block_weights(case))


# -- gradients on the device -------------------------------------------------------------------------------------------


def held_from_before(case: Case) -> float:
    """Return the bytes of accumulated gradients during forward."""
    return stored(case, case.device_gradients) if case.accumulates else 0


def whole_at_end(case: Case) -> float:
    """Return the elements of unsharded gradients at the end of backward.

    They are those of the embedding, the first block and, if a bucket holds it, the block whose reduction is in flight.
    """
    last = table_weights(case) + block_weights(case)
    return last + (block_weights(case) if last + block_weights(case) <= REDUCE_BUCKET else 0)


def on_device(case: Case, found: float) -> float:
    """Return the bytes of gradients on the device, where offloaded ones are only until they are copied."""
    largest = max(table_weights(case), block_weights(case))
    sent = (COPIES_IN_FLIGHT + 1) * case.itemsize * largest + COPIES_IN_FLIGHT * 4 * largest / world(case)
    return min(found, sent) if case.streamed_itemsize > 0 else found


def gradients_in_backward(case: Case) -> float:
    """Return the bytes in backward: unsharded gradients of the head and a block, and the first reduced ones."""
    whole = case.itemsize * (table_weights(case) + block_weights(case))
    reduced = 0 if world(case) == 1 else case.reduced_itemsize * head_weights(case) / world(case)
    first = whole + (held_from_before(case) if case.accumulates else reduced)
    return on_device(case, gradient_bytes(case) if case.accumulates and case.reduces_in_place else first)


def gradients_at_end(case: Case) -> float:
    whole = 0 if case.reduces_in_place or world(case) == 1 else case.itemsize * whole_at_end(case)
    return on_device(case, gradient_bytes(case) + whole)


def gathers_gradients(case: Case) -> bool:
    """Return whether gradients are gathered for the step, because every rank updates all parameters."""
    return not case.shards_states and world(case) > 1


def gradients_at_step(case: Case) -> float:
    """Return the bytes in the step, with gradients gathered one unit ahead."""
    ahead = 4 * (table_weights(case) + 2 * block_weights(case))
    return gradient_bytes(case) + (ahead if gathers_gradients(case) else 0)


# -- activations -------------------------------------------------------------------------------------------------------


def tokens(case: Case) -> float:
    """Return the tokens of a micro-batch that one GPU computes."""
    return case.micro_batch * case.sequence_length / case.sequence_parallel


def norm_activations(case: Case) -> float:
    """Return the bytes per token that a norm saves: its input in fp32, the normalized input, and the output."""
    return (4 + 2 * case.itemsize) * case.hidden + 4


def block_activations(case: Case) -> float:
    """Return the bytes per token that a block saves.

    They are those of two norms; of queries, keys and values (as wide as queries), the output of attention and a sum per
    head; and of the inputs of the matrices and the nonlinearity of the MLP.
    """
    attention = 4 * case.itemsize * case.hidden + 4 * case.heads
    mlp = (4 if case.gated else 2) * case.itemsize * case.ffn
    return 2 * norm_activations(case) + attention + mlp


def rotary_bytes(case: Case) -> float:
    """Return the bytes of sines and cosines of a block, which a batch shares."""
    return 2 * case.itemsize * case.sequence_length / case.sequence_parallel * (case.hidden / case.heads)


def one_block(case: Case) -> float:
    return tokens(case) * block_activations(case) + rotary_bytes(case)


def input_of_block(case: Case) -> float:
    return tokens(case) * case.itemsize * case.hidden


def kept_of_blocks(case: Case) -> float:
    """Return the bytes held from forward to backward: all activations, or inputs of blocks that are not on the host."""
    inputs = 0 if case.host_checkpoints else case.layers
    return inputs * input_of_block(case) if case.recompute else case.layers * one_block(case)


def host_activations(case: Case) -> float:
    """Return the bytes of inputs of blocks in the host memory of a node."""
    return case.gpus * case.layers * input_of_block(case) if case.recompute and case.host_checkpoints else 0


def backward_temporaries(case: Case) -> float:
    """Return the temporary bytes of a block's backward: gradients of the residual stream and inside the MLP."""
    return tokens(case) * case.itemsize * (2 * case.hidden + (3 if case.gated else 2) * case.ffn)


def activations_at_loss(case: Case) -> float:
    in_fp32 = 4 * table_weights(case) if case.tiled_loss else 0  # the sum of the head's gradients
    return kept_of_blocks(case) + tokens(case) * norm_activations(case) + in_fp32


def activations_in_backward(case: Case) -> float:
    """Return the bytes in backward, with the head's gradient if it is to be added to the embedding's."""
    copied_back = min(case.layers, INPUTS_ON_DEVICE) * input_of_block(case) if case.host_checkpoints else 0
    recomputed = one_block(case) + copied_back if case.recompute else 0
    waits = case.itemsize * table_weights(case) if case.tied else 0
    return kept_of_blocks(case) + recomputed + backward_temporaries(case) + waits


def activations_at_end(case: Case) -> float:
    """Return the bytes at the end of backward.

    They are the activations of the first block, or the embedding's gradient (with the head's, if tied) and the received
    parts of the last gradients.
    """
    table = case.itemsize * table_weights(case)
    block = one_block(case) + backward_temporaries(case) + (table if case.tied else 0)
    received = (table + case.itemsize * block_weights(case)) * (world(case) - 1) / world(case)
    made = table + max(received, 2 * table if case.tied else 0)
    return input_of_block(case) + max(block, made)


def activations_at_step(case: Case) -> float:
    """Return the temporary bytes of the step: a unit being gathered, and one tile in fp32."""
    return 4 * (block_weights(case) + min(block_weights(case), TILE_ELEMENTS))


def logits_at_loss(case: Case) -> float:
    """Return the bytes of fp32 logits, or of those of one tile: log-probabilities, and in backward two gradients."""
    of_tile = max(MIN_TOKENS, TILE_BYTES // (4 * case.vocabulary))
    return 12 * case.vocabulary * (min(tokens(case), of_tile) if case.tiled_loss else tokens(case))


# -- one GPU at its peak -----------------------------------------------------------------------------------------------


def peak_at_loss(case: Case) -> float:
    return gathered_at_loss(case) + held_from_before(case) + activations_at_loss(case) + logits_at_loss(case)


def peak_in_backward(case: Case) -> float:
    return gathered_in_backward(case) + gradients_in_backward(case) + activations_in_backward(case)


def peak_at_end(case: Case) -> float:
    return gathered_at_end(case) + gradients_at_end(case) + activations_at_end(case)


def peak_at_step(case: Case) -> float:
    return gradients_at_step(case) + activations_at_step(case) if gathers_gradients(case) else 0


def at_peak(case: Case, at_loss: float, in_backward: float, at_end: float, at_step: float) -> float:
    """Return the value of the phase with the peak."""
    before_end = at_loss if peak_at_loss(case) >= peak_in_backward(case) else in_backward
    later = at_end if peak_at_end(case) >= peak_at_step(case) else at_step
    is_before = max(peak_at_loss(case), peak_in_backward(case)) >= max(peak_at_end(case), peak_at_step(case))
    return before_end if is_before else later


def peak_phase(case: Case) -> float:
    """Return the phase of the peak. 0: loss, 1: last block's backward, 2: end of backward, 3: step."""
    return at_peak(case, 0, 1, 2, 3)


def gathered(case: Case) -> float:
    return at_peak(case, gathered_at_loss(case), gathered_in_backward(case), gathered_at_end(case), 0)


def gradients(case: Case) -> float:
    return at_peak(
        case, held_from_before(case), gradients_in_backward(case), gradients_at_end(case), gradients_at_step(case)
    )


def activations(case: Case) -> float:
    """Return the bytes of activations and temporaries."""
    return at_peak(
        case,
        activations_at_loss(case),
        activations_in_backward(case),
        activations_at_end(case),
        activations_at_step(case),
    )


def logits(case: Case) -> float:
    return at_peak(case, logits_at_loss(case), 0, 0, 0)


def streamed_chunks(case: Case) -> float:
    """Return the bytes of chunks of offloaded states that are streamed through the GPU."""
    largest = max(table_weights(case), block_weights(case)) / world(case)
    return IN_FLIGHT * min(CHUNK_BYTES, largest * case.streamed_itemsize)


def workspaces(case: Case) -> float:
    """Return the bytes of the workspace of cuBLAS, and of streamed chunks."""
    return WORKSPACE + streamed_chunks(case)


def allocated(case: Case) -> float:
    """Return the forecast of `torch.cuda.max_memory_allocated`."""
    states = stored_parameters(case) + masters(case) + moments(case)
    return states + gathered(case) + gradients(case) + activations(case) + logits(case) + workspaces(case)


def reserve(case: Case) -> float:
    """Return the bytes that the allocator holds and cannot use, as `onefold plan` counts them."""
    return FRAGMENTATION * allocated(case)


def context(case: Case) -> float:
    """Return the bytes of the CUDA context and the buffers of NCCL."""
    return CONTEXT + (NCCL if world(case) > 1 else 0)


def overhead(case: Case) -> float:
    """Return the bytes of everything but the model."""
    return workspaces(case) + reserve(case) + context(case)


def gpu_bytes(case: Case) -> float:
    return allocated(case) + reserve(case) + context(case)


def fits(case: Case) -> bool:
    on_gpu = gpu_bytes(case) <= case.gpu_memory
    return on_gpu and host_bytes(case) <= host_room(case) and nvme_bytes(case) <= case.nvme


def is_tight(case: Case) -> bool:
    """Return whether the case fits, but leaves little GPU memory."""
    return fits(case) and case.gpu_memory - gpu_bytes(case) < MARGIN * case.gpu_memory
