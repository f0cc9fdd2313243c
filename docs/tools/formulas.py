"""What a run holds, as formulas of a few numbers: the arithmetic of the page `docs/what-fits.html`.

[Note: one formula, two languages]
These functions are written once, here, and `to_javascript` turns them into the page's script. So they are plain:
numbers and flags of a `Case`, local names, sums and products, comparisons, choices, and calls of each other. The tests
hold them against the plan (`count_bytes`) and against dry runs of a step; `onefold plan` is exact where this is a
formula.

[Note: the fullest moment]
When the loss has been computed, all activations are there, and the logits. When the last block's backward runs, its
temporaries and the first gradients are there too, and the logits are gone. When backward ends, all gradients are there
and hardly an activation; in between these grow and shrink in proportion. Stage 0 then gathers gradients for its step.
"""

from __future__ import annotations

from dataclasses import dataclass

from onefold.config import Config
from onefold.offload.offload_memory import COPIES_IN_FLIGHT
from onefold.optim.gpu_stream import CHUNK_BYTES, IN_FLIGHT
from onefold.optim.tiles import TILE
from onefold.tools.estimate.forecast import CONTEXT, FRAGMENTATION, HOST_SHARE, MARGIN, NCCL, PROCESS, WORKSPACE

_DEFAULTS = Config().zero_optimization
PREFETCH = _DEFAULTS.stage3_prefetch_bucket_size
MAX_LIVE = _DEFAULTS.stage3_max_live_parameters
MAX_REUSE = _DEFAULTS.stage3_max_reuse_distance
REDUCE_BUCKET = _DEFAULTS.reduce_bucket_size
TILE_ELEMENTS = TILE["cuda"]
MAX_IN_CPU = _DEFAULTS.offload_param.max_in_cpu


@dataclass(frozen=True)
class Case:
    """A decoder out of equal blocks, the nodes that train it with Adam, and how."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    tied: bool
    gated: bool
    """Three matrices in an MLP, as Llama has, or two, as GPT has."""
    gpus: int
    """On each node."""
    nodes: int
    gpu_memory: float
    """Bytes, as the others:"""
    host_memory: float
    nvme: float
    """both of a node."""
    shards_parameters: bool
    shards_gradients: bool
    shards_states: bool
    offload_optimizer: str
    """none, cpu or nvme, as in a config; so is"""
    offload_param: str
    micro_batch: int
    sequence_length: int
    recompute: bool
    itemsize: int
    """Of parameters and activations: 2 for bf16, 4 for fp32."""
    accumulates: bool
    """A step takes several micro-steps."""
    state_itemsize: float
    """Of moments: 4 for fp32, with its share of a scale for int8."""
    master_rest: float
    """Bytes that a master in bf16 weights and more bits has beside the weight; 0: it is in fp32."""


# -- shape -------------------------------------------------------------------------------------------------------------


def world(case: Case) -> float:
    return case.gpus * case.nodes


def block_weights(case: Case) -> float:
    """Elements of a block's matrices."""
    key_value = 2 * case.hidden * case.kv_heads * (case.hidden / case.heads)
    return 2 * case.hidden * case.hidden + key_value + (3 if case.gated else 2) * case.hidden * case.ffn


def norm_weights(case: Case) -> float:
    """Elements of all norms, which stay unsharded."""
    return (2 * case.layers + 1) * case.hidden


def table_weights(case: Case) -> float:
    """Elements of the embedding, and of the head again where they are not tied."""
    return case.vocabulary * case.hidden


def head_weights(case: Case) -> float:
    """Elements of a head of its own."""
    return 0 if case.tied else table_weights(case)


def num_parameters(case: Case) -> float:
    return case.layers * block_weights(case) + norm_weights(case) + table_weights(case) + head_weights(case)


# -- model states of one rank, at rest --------------------------------------------------------------------------------


def offloads(case: Case) -> bool:
    """Whether masters and moments leave the device."""
    return case.shards_states and case.offload_optimizer != "none"


def offloads_parameters(case: Case) -> bool:
    """Parameters are cast from masters, so they leave the device only where masters do."""
    return case.shards_parameters and offloads(case) and case.offload_param != "none"


def shard(case: Case) -> float:
    return num_parameters(case) / world(case)


def stepped(case: Case) -> float:
    """Elements that one rank steps."""
    return shard(case) if case.shards_states else num_parameters(case)


def splits_masters(case: Case) -> bool:
    """A master is the 16-bit weight and a rest; fp32 parameters have none."""
    return case.itemsize == 2 and case.master_rest > 0


def rests_unsharded(case: Case) -> bool:
    """A single rank has nothing to gather, unless parameters are cast from masters or come from the host."""
    casts = case.itemsize == 2 and not offloads(case) and not splits_masters(case)
    return not case.shards_parameters or (world(case) == 1 and not casts and not offloads_parameters(case))


def resting_parameters(case: Case) -> float:
    """Bytes of the device; where fp32 masters are there too, sharded parameters are cast from them."""
    norms = case.itemsize * norm_weights(case)
    is_apart = splits_masters(case) or offloads(case)
    sharded = case.itemsize * shard(case) if is_apart and not offloads_parameters(case) else norms
    return case.itemsize * num_parameters(case) if rests_unsharded(case) else sharded


def beside_weights(case: Case) -> float:
    """Elements whose masters rest in the same tier as their weights."""
    on_nvme = parameter_elements_on_nvme(case)
    below = stepped(case) - on_nvme if case.offload_optimizer == "cpu" else on_nvme
    offloaded = below if offloads_parameters(case) else 0
    return offloaded if offloads(case) else stepped(case)


def master_bytes(case: Case) -> float:
    """Wherever they rest. In fp32 the parameter that stays is its own master; of one that is split, the weight is the
    parameter where both rest in one tier.
    """
    is_parameter = case.itemsize == 4 and rests_unsharded(case) and not offloads(case)
    whole = 0 if is_parameter else 4 * stepped(case)
    split = (2 + case.master_rest) * stepped(case) - 2 * beside_weights(case)
    return split if splits_masters(case) else whole


def moment_bytes(case: Case) -> float:
    return 2 * case.state_itemsize * stepped(case)


def reduced_itemsize(case: Case) -> float:
    """Sums over ranks or micro-steps are kept in fp32."""
    return case.itemsize if world(case) == 1 and not case.accumulates else 4


def keeps_whole_gradient(case: Case) -> bool:
    """A gradient waits unsharded until the step, and is reduced in its place."""
    waits = not offloads(case) and (not case.shards_gradients or world(case) == 1)
    return waits and (world(case) == 1 or case.accumulates or case.itemsize == 4)


def gradient_bytes(case: Case) -> float:
    """When backward ends, wherever they rest."""
    return reduced_itemsize(case) * (num_parameters(case) if keeps_whole_gradient(case) else shard(case))


# -- below the device --------------------------------------------------------------------------------------------------


def fills_cpu(case: Case) -> float:
    """Elements of whole units that `max_in_cpu` holds: all, or the embedding and the first blocks."""
    table = table_weights(case) / world(case)
    block = block_weights(case) / world(case)
    blocks = min(case.layers, (MAX_IN_CPU - table) // block)
    some = table + blocks * block if table <= MAX_IN_CPU else 0
    return shard(case) if shard(case) <= MAX_IN_CPU else some


def parameter_elements_on_nvme(case: Case) -> float:
    """Beyond `max_in_cpu`; where the host steps fp32 masters, these are what is gathered."""
    is_master = case.itemsize == 4 and case.offload_optimizer == "cpu"
    wanted = offloads_parameters(case) and case.offload_param == "nvme" and not is_master
    return shard(case) - fills_cpu(case) if wanted else 0


def parameters_on_host(case: Case) -> float:
    is_master = case.itemsize == 4 and case.offload_optimizer == "cpu"
    elements = shard(case) - parameter_elements_on_nvme(case)
    return case.itemsize * elements if offloads_parameters(case) and not is_master else 0


def parameters_on_nvme(case: Case) -> float:
    """In fp32 a master on the same drive is the parameter."""
    return case.itemsize * parameter_elements_on_nvme(case) if case.itemsize == 2 else 0


def states_on_host(case: Case) -> float:
    """Masters and moments of one rank."""
    return master_bytes(case) + moment_bytes(case) if offloads(case) and case.offload_optimizer == "cpu" else 0


def states_on_nvme(case: Case) -> float:
    return master_bytes(case) + moment_bytes(case) if offloads(case) and case.offload_optimizer == "nvme" else 0


def gradients_on_host(case: Case) -> float:
    return gradient_bytes(case) if offloads(case) else 0


def host_parameters(case: Case) -> float:
    """Of a node, as the following."""
    return case.gpus * parameters_on_host(case)


def host_gradients(case: Case) -> float:
    return case.gpus * gradients_on_host(case)


def host_states(case: Case) -> float:
    return case.gpus * states_on_host(case)


def host_processes(case: Case) -> float:
    return case.gpus * PROCESS


def host_bytes(case: Case) -> float:
    return host_parameters(case) + host_gradients(case) + host_states(case) + host_processes(case)


def nvme_parameters(case: Case) -> float:
    return case.gpus * parameters_on_nvme(case)


def nvme_states(case: Case) -> float:
    return case.gpus * states_on_nvme(case)


def nvme_bytes(case: Case) -> float:
    return nvme_parameters(case) + nvme_states(case)


def host_room(case: Case) -> float:
    """The host keeps some memory for itself."""
    return case.host_memory * HOST_SHARE


# -- gathered parameters -----------------------------------------------------------------------------------------------


def blocks_kept(case: Case) -> float:
    """Blocks that stay unsharded from their forward to their backward: the way there and back is short enough, and
    there is room.
    """
    near = max(0, -(-(MAX_REUSE / 2 - head_weights(case)) // block_weights(case)))
    room = max(0, (MAX_LIVE - table_weights(case)) // block_weights(case))
    return min(case.layers, near, room)


def blocks_ahead(case: Case) -> float:
    """Blocks that are gathered before they are needed, beside those that are kept."""
    wanted = -(-PREFETCH // block_weights(case))
    live = table_weights(case) + blocks_kept(case) * block_weights(case)
    room = max(0, (MAX_LIVE - live) // block_weights(case))
    return min(case.layers - blocks_kept(case), wanted, room)


def gathered_at_loss(case: Case) -> float:
    elements = table_weights(case) + (blocks_kept(case) + blocks_ahead(case)) * block_weights(case)
    return 0 if rests_unsharded(case) else case.itemsize * elements


def gathered_in_backward(case: Case) -> float:
    """The head has been resharded, unless it is the embedding, which the whole model encloses."""
    blocks = max(1, blocks_kept(case) + blocks_ahead(case)) * block_weights(case)
    return 0 if rests_unsharded(case) else case.itemsize * (blocks + (table_weights(case) if case.tied else 0))


def gathered_at_end(case: Case) -> float:
    """Of the first two blocks, where there is room for both."""
    blocks = min(2, case.layers) if 2 * block_weights(case) <= MAX_LIVE else 1
    elements = blocks * block_weights(case) + (table_weights(case) if case.tied else 0)
    return 0 if rests_unsharded(case) else case.itemsize * elements


# -- gradients on the device -------------------------------------------------------------------------------------------


def held_from_before(case: Case) -> float:
    """Of earlier micro-steps, when a forward runs."""
    return gradient_bytes(case) if case.accumulates and not offloads(case) else 0


def whole_at_end(case: Case) -> float:
    """Elements of whole gradients when backward ends: of the embedding, the first block and, where a bucket holds it,
    of the block whose reduction is in flight.
    """
    last = table_weights(case) + block_weights(case)
    return last + (block_weights(case) if last + block_weights(case) <= REDUCE_BUCKET else 0)


def on_device(case: Case, found: float) -> float:
    """Bytes of gradients: what is offloaded is on the device only while it is on its way."""
    largest = max(table_weights(case), block_weights(case))
    sent = (COPIES_IN_FLIGHT + 1) * case.itemsize * largest + COPIES_IN_FLIGHT * 4 * largest / world(case)
    return min(found, sent) if offloads(case) else found


def gradients_in_backward(case: Case) -> float:
    """Whole ones of the head and of the block whose backward runs, the first reduced."""
    whole = case.itemsize * (table_weights(case) + block_weights(case))
    reduced = 0 if world(case) == 1 else reduced_itemsize(case) * head_weights(case) / world(case)
    first = whole + (held_from_before(case) if case.accumulates else reduced)
    return on_device(case, gradient_bytes(case) if case.accumulates and keeps_whole_gradient(case) else first)


def gradients_at_end(case: Case) -> float:
    whole = 0 if keeps_whole_gradient(case) or world(case) == 1 else case.itemsize * whole_at_end(case)
    return on_device(case, gradient_bytes(case) + whole)


def gathers_gradients(case: Case) -> bool:
    """Where every rank steps everything, it needs the sums of all ranks."""
    return not case.shards_states and world(case) > 1


def gradients_at_step(case: Case) -> float:
    """With those that are gathered for it, a unit ahead."""
    ahead = 4 * (table_weights(case) + 2 * block_weights(case))
    return gradient_bytes(case) + (ahead if gathers_gradients(case) else 0)


# -- activations -------------------------------------------------------------------------------------------------------


def tokens(case: Case) -> float:
    return case.micro_batch * case.sequence_length


def norm_activations(case: Case) -> float:
    """Bytes a token that autograd keeps of a norm: its input in fp32, what is scaled, and what comes of it."""
    return (4 + 2 * case.itemsize) * case.hidden + 4


def block_activations(case: Case) -> float:
    """Bytes a token that autograd keeps of a block: two norms; queries, keys and values as wide as queries, what comes
    of them and a sum a head; and of the MLP what its matrices and its nonlinearity read.
    """
    attention = 4 * case.itemsize * case.hidden + 4 * case.heads
    mlp = (4 if case.gated else 2) * case.itemsize * case.ffn
    return 2 * norm_activations(case) + attention + mlp


def rotary_bytes(case: Case) -> float:
    """Of a block: sines and cosines, of queries and of keys, the same for all of a batch."""
    return 2 * case.itemsize * case.sequence_length * (case.hidden / case.heads)


def one_block(case: Case) -> float:
    return tokens(case) * block_activations(case) + rotary_bytes(case)


def kept_of_blocks(case: Case) -> float:
    """From forward to backward: all, or inputs alone."""
    return case.layers * (tokens(case) * case.itemsize * case.hidden if case.recompute else one_block(case))


def backward_temporaries(case: Case) -> float:
    """Bytes while a block's backward runs: gradients of the residual stream and inside the MLP."""
    return tokens(case) * case.itemsize * (2 * case.hidden + (3 if case.gated else 2) * case.ffn)


def activations_at_loss(case: Case) -> float:
    return kept_of_blocks(case) + tokens(case) * norm_activations(case)


def activations_in_backward(case: Case) -> float:
    """With the head's gradient where it waits for the embedding's, to be added to it."""
    recomputed = one_block(case) if case.recompute else 0
    waits = case.itemsize * table_weights(case) if case.tied else 0
    return kept_of_blocks(case) + recomputed + backward_temporaries(case) + waits


def activations_at_end(case: Case) -> float:
    """The first block's; or the embedding's gradient as autograd makes it, and what other ranks send of the last ones.
    Tied, the head's is added to it.
    """
    table = case.itemsize * table_weights(case)
    block = one_block(case) + backward_temporaries(case) + (table if case.tied else 0)
    received = (table + case.itemsize * block_weights(case)) * (world(case) - 1) / world(case)
    made = table + max(received, 2 * table if case.tied else 0)
    return tokens(case) * case.itemsize * case.hidden + max(block, made)


def activations_at_step(case: Case) -> float:
    """None: what arrives of a unit while it is gathered, and a tile of a step in fp32."""
    return 4 * (block_weights(case) + min(block_weights(case), TILE_ELEMENTS))


def logits_at_loss(case: Case) -> float:
    """In fp32: their logarithms, and in backward two gradients of these."""
    return 12 * case.vocabulary * tokens(case)


# -- one GPU at its fullest --------------------------------------------------------------------------------------------


def peak_at_loss(case: Case) -> float:
    return gathered_at_loss(case) + held_from_before(case) + activations_at_loss(case) + logits_at_loss(case)


def peak_in_backward(case: Case) -> float:
    return gathered_in_backward(case) + gradients_in_backward(case) + activations_in_backward(case)


def peak_at_end(case: Case) -> float:
    return gathered_at_end(case) + gradients_at_end(case) + activations_at_end(case)


def peak_at_step(case: Case) -> float:
    return gradients_at_step(case) + activations_at_step(case) if gathers_gradients(case) else 0


def at_fullest(case: Case, at_loss: float, in_backward: float, at_end: float, at_step: float) -> float:
    """The one of the moment that is fullest."""
    before_end = at_loss if peak_at_loss(case) >= peak_in_backward(case) else in_backward
    later = at_end if peak_at_end(case) >= peak_at_step(case) else at_step
    is_before = max(peak_at_loss(case), peak_in_backward(case)) >= max(peak_at_end(case), peak_at_step(case))
    return before_end if is_before else later


def fullest_moment(case: Case) -> float:
    """0: the loss, 1: the last block's backward, 2: the end of backward, 3: the step."""
    return at_fullest(case, 0, 1, 2, 3)


def gathered(case: Case) -> float:
    return at_fullest(case, gathered_at_loss(case), gathered_in_backward(case), gathered_at_end(case), 0)


def gradients(case: Case) -> float:
    return at_fullest(
        case, held_from_before(case), gradients_in_backward(case), gradients_at_end(case), gradients_at_step(case)
    )


def activations(case: Case) -> float:
    """With temporaries."""
    return at_fullest(
        case,
        activations_at_loss(case),
        activations_in_backward(case),
        activations_at_end(case),
        activations_at_step(case),
    )


def logits(case: Case) -> float:
    return at_fullest(case, logits_at_loss(case), 0, 0, 0)


def masters(case: Case) -> float:
    return 0 if offloads(case) else master_bytes(case)


def moments(case: Case) -> float:
    return 0 if offloads(case) else moment_bytes(case)


def passing(case: Case) -> float:
    """Chunks of what rests below the device, on their way through it."""
    elements = max(table_weights(case), block_weights(case)) / world(case)
    weight = 2 + case.master_rest if splits_masters(case) else 4
    largest = elements * (weight + 2 * case.state_itemsize + reduced_itemsize(case))
    return IN_FLIGHT * min(CHUNK_BYTES, largest) if offloads(case) else 0


def beside(case: Case) -> float:
    """Memory of cuBLAS, and of a step."""
    return WORKSPACE + passing(case)


def allocated(case: Case) -> float:
    """What `torch.cuda.max_memory_allocated` will say."""
    states = resting_parameters(case) + masters(case) + moments(case)
    return states + gathered(case) + gradients(case) + activations(case) + logits(case) + beside(case)


def reserve(case: Case) -> float:
    """What the allocator cannot use, as `onefold plan` counts it."""
    return FRAGMENTATION * allocated(case)


def context(case: Case) -> float:
    """Outside the allocator: CUDA's own, and NCCL's buffers."""
    return CONTEXT + (NCCL if world(case) > 1 else 0)


def reserve_and_context(case: Case) -> float:
    """All that is not the model's."""
    return beside(case) + reserve(case) + context(case)


def gpu_bytes(case: Case) -> float:
    return allocated(case) + reserve(case) + context(case)


def fits(case: Case) -> bool:
    on_gpu = gpu_bytes(case) <= case.gpu_memory
    return on_gpu and host_bytes(case) <= host_room(case) and nvme_bytes(case) <= case.nvme


def is_tight(case: Case) -> bool:
    """It fits, and leaves little of the GPU's memory."""
    return fits(case) and case.gpu_memory - gpu_bytes(case) < MARGIN * case.gpu_memory
