"""Bugs that measure the first tier, for `mutants.py --set tier`. They were written before its cases were chosen anew.

Most of them show in some combination of stage, dtype, tier, wire, world size, overlap and accumulation only, or only
with an unusual model; the comment above each names its condition. `tests` names whole files, the nearest first.
"""

from __future__ import annotations

from mutations import Mutation

TIER_MUTATIONS = [
    # -- config, plan ---------------------------------------------------------------------------------------------
    # mics_shard_size with a stage below 3.
    Mutation(
        "tier-mics-in-every-stage",
        "onefold/config/batch.py",
        "if zero.stage == 3 and zero.mics_shard_size > 0 else 1",
        "if zero.mics_shard_size > 0 else 1",
        "test_config.py test_plan.py test_mics.py",
    ),
    # bf16 or fp16, one rank, several micro-steps.
    Mutation(
        "tier-one-rank-accumulates-narrow",
        "onefold/plan/plan.py",
        "return dtype if num_micro_steps == 1 and num_ranks == 1 else self._accumulate(dtype)",
        "return dtype if num_ranks == 1 else self._accumulate(dtype)",
        "test_plan.py test_exactness.py test_engine.py test_memory.py",
    ),
    # A leaf module inside a block.
    Mutation(
        "tier-leaf-inside-a-block",
        "onefold/plan/cut.py",
        "chosen = _outermost(chosen | _leaves(model, leaves))",
        "chosen = chosen | _leaves(model, leaves)",
        "test_plan.py test_stage3.py",
    ),
    # 16 bits, parameters on NVMe and states on the host.
    Mutation(
        "tier-parameters-stay-on-host",
        "onefold/plan/tiers.py",
        "elif tier is Tier.NVME and states is Tier.HOST and has_master_dtype:",
        "elif tier is Tier.NVME and states is Tier.HOST:",
        "test_memory.py test_offload_cases.py test_plan.py",
    ),
    # -- comm -----------------------------------------------------------------------------------------------------
    # MiCS with communication_data_type.
    Mutation(
        "tier-mics-ignores-the-wire",
        "onefold/comm/replicated.py",
        "source = reduction.source.to(reduction.wire).view(group.num_shards, -1)",
        "source = reduction.source.view(group.num_shards, -1)",
        "test_mics.py test_wires_cases.py test_traffic.py",
    ),
    # Several nodes, gradients that are reduced in every micro-step.
    Mutation(
        "tier-nodes-forget-the-first-micro-step",
        "onefold/comm/two_level.py",
        "add_branches(one.branches, one.chunk.target, add=one.chunk.add)",
        "add_branches(one.branches, one.chunk.target, add=False)",
        "test_two_level.py test_wires.py test_network.py",
    ),
    # Quantized wires, a gradient that is not finite.
    Mutation(
        "tier-overflow-becomes-zeros",
        "onefold/comm/codec.py",
        "torch.where(usable, amax * (1 / self.limit), nothing), torch.nan)",
        "torch.where(usable, amax * (1 / self.limit), nothing), nothing)",
        "test_codec.py test_wires_cases.py test_wires.py",
    ),
    # The backend's own reductions, fp32, several micro-steps in stage 2 or 3.
    Mutation(
        "tier-native-sum-in-place",
        "onefold/comm/native.py",
        "in_place = not reduction.add and reduction.target.dtype == source.dtype",
        "in_place = reduction.target.dtype == source.dtype",
        "test_traffic.py test_wires_cases.py",
    ),
    # -- offload --------------------------------------------------------------------------------------------------
    # States on the host, 16 bits, one rank, a second backward before the step.
    Mutation(
        "tier-widened-without-values",
        "onefold/offload/grad_shard.py",
        "self._own = self._memory.more_host(self._size, dtype).copy_(self._own)",
        "self._own = self._memory.more_host(self._size, dtype)",
        "test_offload.py test_offload_cases.py test_regressions.py",
    ),
    # A parameter frozen after initialize, on every rank but the first.
    Mutation(
        "tier-frozen-range-of-the-first-rank",
        "onefold/offload/shard_store.py",
        "low, high = member.start - self.start, round_up(member.stop, PARAMETER_ALIGNMENT) - self.start\n"
        "            segments",
        "low, high = member.start, round_up(member.stop, PARAMETER_ALIGNMENT) - self.start\n            segments",
        "test_held_parameters.py test_offload_cases.py test_states.py",
    ),
    # bf16 masters or states, a parameter that is cut between two ranks.
    Mutation(
        "tier-dither-of-the-shard",
        "onefold/offload/shard_store.py",
        "ranges.append((low, high, Dither(step, member.name, low - start)))",
        "ranges.append((low, high, Dither(step, member.name, low - max(start, 0))))",
        "test_states.py test_checkpoints.py",
    ),
    # onefold.master_dtype bf16_int8.
    Mutation(
        "tier-split-master-rounds-down",
        "onefold/offload/state_codec.py",
        "rest.copy_(below.add_(128).bitwise_right_shift_(8).clamp_(-127, 127))",
        "rest.copy_(below.bitwise_right_shift_(8).clamp_(-127, 127))",
        "test_states.py test_reference.py",
    ),
    # Offloaded states, several ranks: device buffers pile up.
    Mutation(
        "tier-reduced-gradient-not-given-back",
        "onefold/offload/grad_offload.py",
        "            if temporary[0] is not slot:\n                pool.give_back(temporary[0])\n",
        "",
        "test_offload.py test_offload_cases.py test_memory.py test_resident_memory.py",
    ),
    # -- runtime --------------------------------------------------------------------------------------------------
    # Stage 3, a backward that is itself differentiated.
    Mutation(
        "tier-recorded-backward-resharded",
        "onefold/runtime/unit.py",
        "        if torch.is_grad_enabled():  # a backward that is itself recorded creates nodes without hooks\n"
        "            self.keep_for_pass()\n",
        "",
        "test_stage3.py test_cases.py",
    ),
    # Stage 3, a block that returns one of its inputs.
    Mutation(
        "tier-input-passed-on-is-an-output",
        "onefold/runtime/unit.py",
        "nodes = [node for node in produced if not any(node is passed_on for passed_on in inputs)]",
        "nodes = produced",
        "test_stage3.py test_cases.py",
    ),
    # hpZ, frozen parameters, an evaluation: bytes across nodes.
    Mutation(
        "tier-frozen-secondary-unused",
        "onefold/runtime/flat_param.py",
        "if self.secondary is not None and not lossless and (use_secondary or not self.trainable):",
        "if self.secondary is not None and not lossless and use_secondary:",
        "test_wires.py test_wires_cases.py test_stage3.py",
    ),
    # Stage 0, frozen layers, several ranks, a checkpoint that is loaded.
    Mutation(
        "tier-frozen-not-loaded-in-stage-0",
        "onefold/runtime/schedule.py",
        "if param.stays_unsharded and (self._plan.shards_states or not param.trainable)",
        "if param.stays_unsharded and self._plan.shards_states",
        "test_checkpoints.py test_offload_cases.py",
    ),
    # Quantized gradients that are reduced in place, a step after one that overflowed.
    Mutation(
        "tier-padding-stays-nan",
        "onefold/runtime/flat_grad.py",
        "if self._plan.gradients.wire is not Wire.NATIVE:",
        "if self._plan.gradients.wire is Wire.INT8:",
        "test_wires_cases.py test_wires.py test_nonfinite.py",
    ),
    # Error feedback, a checkpoint that is loaded into an engine that has trained.
    Mutation(
        "tier-error-feedback-of-another-run",
        "onefold/runtime/schedule.py",
        "        for param in self.trained_params():\n            param.grad.reset_error_feedback()\n",
        "",
        "test_wires_cases.py test_wires.py test_checkpoints.py",
    ),
    # -- optim ----------------------------------------------------------------------------------------------------
    # 16 bits, one rank, one micro-step, an optimizer that is no rule, clipping.
    Mutation(
        "tier-own-class-scales-narrow",
        "onefold/optim/instance_step.py",
        "scaled = gradient.to(store.master.dtype).mul(step.coefficient)",
        "scaled = gradient.mul(step.coefficient).to(store.master.dtype)",
        "test_optimizers.py test_reference.py test_engine.py test_exactness.py",
    ),
    # Muon, a matrix frozen after the first step.
    Mutation(
        "tier-muon-route-of-the-first-step",
        "onefold/optim/matrix_steps.py",
        "key = store, frozenset(store.frozen)",
        "key = store, frozenset[int]()",
        "test_muon.py test_held_parameters.py",
    ),
    # A torch optimizer that counts steps, states on NVMe, several tiles of one group.
    Mutation(
        "tier-tiles-count-steps-together",
        "onefold/optim/instance.py",
        "known = {**copy.deepcopy(self.loose.get(tile.group, {})), **tile.states} if has_states else {}",
        "known = {**self.loose.get(tile.group, {}), **tile.states} if has_states else {}",
        "test_optimizers.py test_offload_cases.py test_reference.py",
    ),
    # A rate that is a tensor, a step of the host's that is still under way when a scheduler writes to it.
    Mutation(
        "tier-tensor-rate-read-late",
        "onefold/optim/step.py",
        'return [{key: plain_number(value) for key, value in group.items() if key != "params"} for group in'
        " self.groups]",
        'return [{key: value for key, value in group.items() if key != "params"} for group in self.groups]',
        "test_offload_cases.py test_schedules.py test_engine.py",
    ),
    # -- engine ---------------------------------------------------------------------------------------------------
    # fp16, a loss in fp16.
    Mutation(
        "tier-loss-scaled-in-fp16",
        "onefold/engine/core.py",
        "scaled = loss.float() * decision.loss_scale.value if decision.scales_loss else loss",
        "scaled = loss * decision.loss_scale.value if decision.scales_loss else loss",
        "test_engine.py test_loss_scale.py test_cases.py",
    ),
    # States that lie along no parameter, several ranks, a checkpoint that is loaded.
    Mutation(
        "tier-loose-states-of-rank-0",
        "onefold/engine/checkpoint_loader.py",
        "for rank in range(checkpoint.manifest.world_size):",
        "for rank in range(1):",
        "test_checkpoints.py test_muon.py test_optimizers.py",
    ),
    # -- checkpoint -----------------------------------------------------------------------------------------------
    # A parameter without elements.
    Mutation(
        "tier-empty-parameter-not-saved",
        "onefold/checkpoint/state/slots.py",
        "if low < high or (member.start == member.stop and start == 0):",
        "if low < high:",
        "test_checkpoints.py test_export.py test_cases.py",
    ),
    # Tied weights whose first name is another one in the checkpoint.
    Mutation(
        "tier-tied-under-another-name",
        "onefold/checkpoint/loading/load.py",
        "for candidate, name in [*((name, name) for name in names), *aliases.items()]:",
        "for candidate, name in ((name, name) for name in names):",
        "test_checkpoints.py test_manifests.py test_export.py",
    ),
    # Buffers that differ between ranks, a load on another number of ranks.
    Mutation(
        "tier-buffers-of-another-world",
        "onefold/checkpoint/loading/load.py",
        "stored = own if same_world and own in checkpoint.manifest.tensors",
        "stored = own if own in checkpoint.manifest.tensors",
        "test_checkpoints.py test_offload_cases.py",
    ),
    # keep_last, later saves without save_latest.
    Mutation(
        "tier-retention-removes-latest",
        "onefold/checkpoint/format/folder.py",
        "kept = {found.tag for found in complete[:keep_last]} | {read_latest(save_dir)}",
        "kept = {found.tag for found in complete[:keep_last]}",
        "test_checkpoint_ranges.py test_checkpoints.py test_ckpt_command.py test_checkpoint_faults.py",
    ),
    # -- all others -----------------------------------------------------------------------------------------------
    # Offloaded states: what each stage would hold on the device.
    Mutation(
        "tier-bytes-by-stage-without-offloaded",
        "onefold/report/describe.py",
        "    if on_device:\n",
        "    if on_device and not any(spec.residency.offloads_states for spec in specs):\n",
        "test_engine.py test_memory.py test_offload_cases.py test_run_record.py",
    ),
    # A number of parameters that 32 does not divide.
    Mutation(
        "tier-remainder-of-parameters",
        "onefold/tools/estimate/models.py",
        "num_parameters // _NUM_BLOCKS + (place < num_parameters % _NUM_BLOCKS)",
        "num_parameters // _NUM_BLOCKS",
        "test_estimate.py test_what_fits.py",
    ),
    # Accumulation: the loss that `train` shows.
    Mutation(
        "tier-train-loss-of-micro-steps",
        "onefold/tools/train/loop.py",
        "loss_sum[None] / (accumulation * world_size)",
        "loss_sum[None] / world_size",
        "test_train.py test_run_record.py",
    ),
    # A rank that a signal has killed.
    Mutation(
        "tier-killed-rank-not-blamed",
        "onefold/tools/cli/rank_processes.py",
        "key=lambda end: end.when",
        "key=lambda end: end.rank",
        "test_launch.py test_rank_agent.py",
    ),
    # A stop signal that another rank than 0 has received.
    Mutation(
        "tier-stop-signal-of-rank-0-only",
        "onefold/optim/norm.py",
        "max(row[1] % _CALL // _STOP for row in rows)",
        "rows[0][1] % _CALL // _STOP",
        "test_stop_signals.py",
    ),
    # TiledLinear with a bias and several tiles along its input.
    Mutation(
        "tier-bias-in-every-tile",
        "onefold/compat/tiling.py",
        "bias=bias and index == in_splits - 1",
        "bias=bias",
        "test_compat_zero.py test_as_deepspeed.py",
    ),
    # zero.Init, a module with several parameters of which one is written anew.
    Mutation(
        "tier-init-loses-the-bias",
        "onefold/zero.py",
        "blank = handle not in self._open and sum(len(param.parameters) for param in handle.params) == 1",
        "blank = handle not in self._open and len(handle.params) == 1",
        "test_zero.py test_compat_zero.py",
    ),
    # Offloaded states, one micro-step, clipping: a gradient that the user sets.
    Mutation(
        "tier-norm-of-the-old-gradient",
        "onefold/utils/__init__.py",
        "    place.param.grad.shard.forget_square_sum()\n",
        "",
        "test_zero.py test_offload_cases.py test_engine.py",
    ),
    # An optimizer class with 8-bit states that names fp32 parameters, beside names in the config.
    Mutation(
        "tier-fp32-names-of-the-config",
        "onefold/start.py",
        "fp32_state_names=(*own.fp32_state_names, *names),",
        "fp32_state_names=names or own.fp32_state_names,",
        "test_states.py test_engine.py",
    ),
    # An iterable dataset without a state, several ranks, a resumed run.
    Mutation(
        "tier-batches-of-all-ranks-thrown-away",
        "onefold/loader.py",
        "num_batches = samples // loader.world_size // batch_size",
        "num_batches = samples // batch_size",
        "test_loader.py test_checkpoints.py test_engine.py",
    ),
    # A checkpointed function inside another one, with profile.
    Mutation(
        "tier-nested-recomputation-timed-twice",
        "onefold/checkpointing.py",
        "if settings.profile and not nested:",
        "if settings.profile:",
        "test_checkpointing.py",
    ),
    # An accumulation count that changes while training.
    Mutation(
        "tier-window-of-the-old-count",
        "onefold/window.py",
        "            self._first = self.micro_steps\n        self._set(self.batch.micro, accumulation)",
        "        self._set(self.batch.micro, accumulation)",
        "test_window.py test_engine.py test_cases.py",
    ),
]
