"""Which setting to take, in a sentence, and what to change where none fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onefold.config import load_config
from onefold.estimate.forecast import HOST_SHARE, Forecast, Question
from onefold.estimate.machines import GB

# Settings that take about as long are told apart by what they send and hold.
_ABOUT = 1.03


@dataclass(frozen=True)
class Advice:
    """The setting to take, if there is one, and why; otherwise what would help."""

    setting: str | None
    reason: str


def advise(question: Question, found: Sequence[Forecast]) -> Advice:
    """Of two settings that are alike in everything the later one, which shards more."""
    fitting = [each for each in found if each.fits]
    if not fitting:
        return Advice(None, _when_nothing_fits(question, found))
    if fitting[0].step is None:
        best = fitting[0]
        if question.machine.world > 1:
            best = min(fitting, key=lambda each: (_below(each), _sends(each), -found.index(each)))
        return Advice(best.setting.name, _why(question, best, found))
    fastest = min(each.step or 0.0 for each in fitting)
    close = [each for each in fitting if (each.step or 0.0) <= fastest * _ABOUT]
    best = min(close, key=lambda each: (_is_rounded(each), _sent(each), each.device.total, -found.index(each)))
    return Advice(best.setting.name, _why(question, best, found))


def _sent(each: Forecast) -> int:
    moved = each.crossing.down + each.crossing.up + each.crossing.read + each.crossing.written
    return moved + (each.traffic.inside + each.traffic.across if each.traffic else 0)


def _is_rounded(each: Forecast) -> bool:
    """Whether what travels is quantized: losses are then not those of other settings."""
    return "zero_quantized_gradients" in each.setting.zero


def _below(each: Forecast) -> int:
    return each.host.total + each.nvme


def _sends(each: Forecast) -> tuple[int, int]:
    """Without a forward nothing is known of traffic but its order: parameters that are sharded travel most."""
    return int(each.setting.shards_parameters), each.device.total


def _why(question: Question, best: Forecast, found: Sequence[Forecast]) -> str:
    spare = question.machine.gpu.memory - best.device.total
    text = f"it fits with {spare / GB:.1f} GB to spare on each GPU"
    if best.step is not None:
        others = [
            each for each in found if each.fits and each is not best and (each.step or 0) > (best.step or 0) * _ABOUT
        ]
        text += f" and is {'the fastest that fits' if others else 'as fast as any that fits'}"
        text += f" (about {best.step:.2f} s a step, bound by {best.bound_by})"
    simpler = [each for each in found[: found.index(best)] if not each.fits]
    if simpler:
        text += f"; {simpler[-1].setting.name} does not fit: {simpler[-1].shortages[0]}"
    return text


def _when_nothing_fits(question: Question, found: Sequence[Forecast]) -> str:
    """The setting that lacks least, and what would make it fit."""
    closest = min(
        found, key=lambda each: max(each.device.total - question.machine.gpu.memory, 0) + _host_lack(question, each)
    )
    lack = closest.device.total - question.machine.gpu.memory
    text = f"nothing fits; closest is {closest.setting.name}: {'; '.join(closest.shortages)}."
    device = closest.device
    if lack > 0 and device.activations + device.logits > device.total // 3:
        batch = question.micro_batch or 1
        if closest.largest_batch:
            text += f" A micro-batch of {closest.largest_batch} instead of {batch} fits."
        elif batch > 1:
            held = (device.activations + device.logits) / GB
            text += f" Activations take {held:.1f} GB at a micro-batch of {batch}: try 1, or shorter sequences."
        text += " Recomputing activations (--recompute) takes most of them away."
    if lack > 0 and device.gathered > lack:
        text += " A smaller stage3_max_live_parameters and stage3_prefetch_bucket_size keep fewer parameters unsharded."
    is_fp32 = load_config(question.document(closest.setting, 1)).state_dtype == "fp32"
    in_fp32 = device.states + closest.host.states if is_fp32 else 0
    if in_fp32:
        where = "each GPU" if device.states else "the host, for each GPU"
        text += f" onefold.state_dtype int8 takes {in_fp32 * 3 / 4 / GB:.1f} GB of optimizer states off {where}."
    if lack > 0:
        text += f" GPUs of {-(-device.total // GB)} GB would do, or more GPUs to shard over."
    elif _host_lack(question, closest):
        text += f" {-(-closest.host_node // GB)} GB of host memory on a node would do, or more nodes."
    return text


def _host_lack(question: Question, each: Forecast) -> int:
    machine = question.machine
    return max(0, each.host_node - int(machine.host_memory * HOST_SHARE)) + max(0, each.nvme - machine.nvme)
