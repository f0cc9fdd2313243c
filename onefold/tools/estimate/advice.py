"""Recommend a setting, or what to change if none fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onefold.config import ConfigError, load_config
from onefold.tools.estimate.expert_advice import hint_at_experts
from onefold.tools.estimate.forecast import MARGIN, Forecast, forecast
from onefold.tools.estimate.machines import GB
from onefold.tools.estimate.ops import OpTimer
from onefold.tools.estimate.question import Question

_LINKS = ("GPU links", "node links", "host bus", "disk")
# Settings whose times differ by less are compared by their traffic and memory.
_ABOUT = 1.03
_ROUNDS_STATES = "It changes numerics: optimizer states are rounded to 8 bits, and losses differ slightly."
# Bytes of each GPU below which a key that saves them is not named.
_WORTH_NAMING = GB // 10


@dataclass(frozen=True)
class Advice:
    """The recommended setting and the reason; without a setting, what would make one fit."""

    setting: str | None
    reason: str


def advise(question: Question, found: Sequence[Forecast], timer: OpTimer | None = None) -> Advice:
    """Recommend the fastest setting that fits.

    Among settings of about the same speed, prefer those that round nothing, leave free memory, and send and store less.
    Among equal ones, prefer the last, which shards most.
    """
    fitting = [each for each in found if each.fits]
    if not fitting:
        return Advice(None, _when_nothing_fits(question, found))
    if fitting[0].step is None:
        best = min(fitting, key=lambda each: (each.is_tight, found.index(each)))
        if question.machine.world > 1:
            best = min(
                fitting,
                key=lambda each: (_offloaded_bytes(each), each.is_tight, _traffic_rank(each), -found.index(each)),
            )
        return Advice(best.setting.name, _why(question, best, found))
    fastest = min(each.step or 0.0 for each in fitting)
    close = [each for each in fitting if (each.step or 0.0) <= fastest * _ABOUT]
    best = min(
        close,
        key=lambda each: (_is_rounded(each), each.is_tight, _bytes_moved(each), each.device.total, -found.index(each)),
    )
    hints = _hint_at_chunks(question, best, timer) + hint_at_experts(question, best, found, timer)
    return Advice(best.setting.name, _why(question, best, found) + hints)


def _hint_at_chunks(question: Question, best: Forecast, timer: OpTimer | None) -> str:
    """Compare accumulation that is bound by a link with one micro-batch in chunks, which gathers each block once."""
    number, config = question.num_micro_steps, load_config(question.document(best.setting, 1))
    if number == 1 or config.onefold.batch_chunks != 0 or best.bound_by not in _LINKS or best.step is None:
        return ""
    together = question.in_chunks()
    try:
        (chunked,) = forecast(together, [best.setting], finds_batch=False, timer=timer)
    except ConfigError:  # blocks that mix the samples of a batch
        return ""
    text = (
        f" Its {number} micro-steps gather every block {number} times. One micro-batch of {together.micro_batch} with "
        f"onefold.batch_chunks {number}"
    )
    if chunked.fits and chunked.step is not None and chunked.step * _ABOUT < best.step:
        text += f" takes about {chunked.step:.2f} s/step and {chunked.device.total / GB:.1f} GB of each GPU."
        return f"{text} Chunks change roundings."
    if chunked.fits:
        return ""
    text += f" gathers them once, but is {chunked.shortages[0]}."
    if chunked.device.logits > sum(shortage.lack for shortage in chunked.shortages):
        text += f" onefold.tiled_cross_entropy saves most of its {chunked.device.logits / GB:.1f} GB of logits."
    return text


def _bytes_moved(each: Forecast) -> int:
    offload = each.offload_traffic
    moved = offload.down + offload.up + offload.read + offload.written
    return moved + (each.traffic.inside + each.traffic.across if each.traffic else 0)


def _is_rounded(each: Forecast) -> bool:
    """Return whether gradients are sent quantized, so that losses differ from those of other settings."""
    return "zero_quantized_gradients" in each.setting.zero


def _offloaded_bytes(each: Forecast) -> int:
    return each.host.total + each.nvme


def _traffic_rank(each: Forecast) -> tuple[int, int]:
    """Return a sort key for traffic without a forward: sharded parameters cause the most."""
    return int(each.setting.shards_parameters), each.device.total


def _why(question: Question, best: Forecast, found: Sequence[Forecast]) -> str:
    text = f"it fits with {best.spare / GB:.1f} GB to spare on each GPU"
    if best.step is not None:
        others = [
            each for each in found if each.fits and each is not best and (each.step or 0) > (best.step or 0) * _ABOUT
        ]
        text += f" and is {'the fastest that fits' if others else 'as fast as any that fits'}"
        text += f" (about {best.step:.2g} s/step" if best.step < 0.1 else f" (about {best.step:.2f} s/step"
        text += f", bound by {best.bound_by})"
    simpler = [each for each in found[: found.index(best)] if not each.fits]
    tight = [each for each in found[: found.index(best)] if each.is_tight and not best.is_tight]
    if tight:
        text += f"; {tight[-1].setting.name} is tight, with {tight[-1].spare / GB:.1f} GB to spare"
    elif simpler:
        text += f"; {simpler[-1].setting.name} does not fit: {simpler[-1].shortages[0]}"
    text += "."
    if best.is_tight:
        text += (
            f" That is tight: less than {MARGIN:.0%} of the GPU's memory is left, and the allocator may need more than "
            "planned."
        )
    if _is_rounded(best):
        exact = [each for each in found if each.fits and each.step is not None and not _is_rounded(each)]
        text += " It quantizes the weights and gradients that it sends (8 and 4 bits), which changes the losses"
        if exact:
            one = min(exact, key=lambda each: each.step or 0.0)
            text += f"; the fastest exact setting is {one.setting.name} (about {one.step:.2f} s/step)"
        text += "."
    if best.is_tight or _offloaded_bytes(best):
        text += _hint_at_recomputing(question, best)
    if best.is_tight:
        text += _hint_at_tiles(question, best)
    if _offloaded_bytes(best) and load_config(question.document(best.setting, 1)).onefold.offloaded_step != "device":
        text += " Offloaded states change roundings, unless onefold.offloaded_step is device."
    return text + _hint_at_ratio(question, best) + _hint_at_int8(question, best, found)


def _hint_at_ratio(question: Question, best: Forecast) -> str:
    """Name the key that keeps states on the GPU as far as there is room."""
    zero = question.document(best.setting, 1)["zero_optimization"]
    offload = zero.get("offload_optimizer")
    if offload is None or "ratio" in offload or best.is_tight or best.spare < _WORTH_NAMING or question.machine.is_cpu:
        return ""
    return (
        f' offload_optimizer.ratio "auto" keeps the states on the GPU that its {best.spare / GB:.1f} GB to spare hold.'
    )


def _hint_at_int8(question: Question, best: Forecast, found: Sequence[Forecast]) -> str:
    """Name the first setting that does not offload, does not fit, and fits with optimizer states of a byte."""
    if not _offloaded_bytes(best) or load_config(question.document(best.setting, 1)).state_dtype != "fp32":
        return ""
    smaller = question.with_key("onefold", "state_dtype", "int8")
    for each in found[: found.index(best)]:
        lack = sum(shortage.lack for shortage in each.shortages)
        if each.fits or _offloaded_bytes(each) or lack > each.device.states * 3 // 4:
            continue
        try:
            (with_int8,) = forecast(smaller, [each.setting], finds_batch=False)
        except ConfigError:  # an optimizer that the key does not support
            return ""
        if with_int8.fits:
            time = f", about {with_int8.step:.2g} s/step" if with_int8.step is not None else ""
            name, spare = each.setting.name, f"{with_int8.spare / GB:.1f} GB to spare{time}"
            return f" With onefold.state_dtype int8, {name} fits without offloading ({spare}). {_ROUNDS_STATES}"
    return ""


def _hint_at_recomputing(question: Question, each: Forecast) -> str:
    held = each.device.activations + each.device.logits
    if question.model.recomputes is not False or held < each.device.total // 3:
        return ""
    return (
        f" Activation checkpointing (--recompute) frees most of the {held / GB:.1f} GB of activations, and changes no "
        "result."
    )


def _hint_at_tiles(question: Question, each: Forecast) -> str:
    """Name the keys that compute or store less at one time, with the GPU memory that each saves, from dry runs."""
    if each.step is None or question.machine.is_cpu:
        return ""
    config, saved, together = load_config(question.document(each.setting, 1)), {}, question
    is_unset = {
        "tiled_loss": config.onefold.tiled_loss == 0 and each.device.logits >= _WORTH_NAMING,
        "tiled_mlp": config.onefold.tiled_mlp == 0,
        "cpu_checkpointing": bool(question.model.recomputes) and not config.activation_checkpointing.cpu_checkpointing,
    }
    for name in (name for name, is_candidate in is_unset.items() if is_candidate):
        section = "activation_checkpointing" if name == "cpu_checkpointing" else "onefold"
        try:
            (found,) = forecast(question.with_key(section, name, True), [each.setting], finds_batch=False)
        except ConfigError:  # a model that the key does not support
            continue
        if each.device.total - found.device.total >= _WORTH_NAMING:
            saved[f"{section}.{name}"] = each.device.total - found.device.total
            together = together.with_key(section, name, True)
    if not saved:
        return ""
    text = f" {_listed(f'{key} saves {num_bytes / GB:.1f} GB' for key, num_bytes in saved.items())} of each GPU."
    text += " Tiles change roundings." if any(key.startswith("onefold.tiled") for key in saved) else ""
    (found,) = forecast(together, [each.setting], finds_batch=False)
    if not each.fits and found.fits:
        text += f" It fits with {'these keys' if len(saved) > 1 else 'this key'}."
    return text


def _when_nothing_fits(question: Question, found: Sequence[Forecast]) -> str:
    """Name the setting with the smallest shortage, and what would make it fit."""
    closest = min(found, key=lambda each: sum(shortage.lack for shortage in each.shortages))
    lacking = _listed(each.amount for each in closest.shortages)
    text = f"no setting fits. Closest is {closest.setting.name}, short by {lacking}."
    device, short = closest.device, {each.resource: each for each in closest.shortages}
    lack = short["GPU"].lack if "GPU" in short else 0
    if closest.largest_batch:
        text += f" A micro-batch of {closest.largest_batch} instead of {question.micro_batch or 1} fits."
    if lack:
        text += _hint_at_recomputing(question, closest) + _hint_at_tiles(question, closest)
    if lack and device.gathered > lack:
        text += " Lower stage3_max_live_parameters and stage3_prefetch_bucket_size to keep fewer parameters unsharded."
    is_fp32 = load_config(question.document(closest.setting, 1)).state_dtype == "fp32"
    in_fp32 = device.states + closest.host.states if is_fp32 else 0
    if in_fp32:
        where = "each GPU" if device.states else "the host, for each GPU"
        text += f" onefold.state_dtype int8 saves {in_fp32 * 3 / 4 / GB:.1f} GB of optimizer states on {where}."
        text += f" {_ROUNDS_STATES}"
    # Given these options, the command finds that the setting fits.
    options = {"GPU": "--gpu-memory", "host": "--host-memory", "NVMe": "--nvme"}
    names = {"GPU": "memory per GPU", "host": "host memory per node", "NVMe": "NVMe per node"}
    wanted = _listed(f"{-(-each.needed // GB)} GB of {names[each.resource]}" for each in closest.shortages)
    flags = " ".join(f"{options[each.resource]} {-(-each.needed // GB)}" for each in closest.shortages)
    more = "more GPUs to shard over" if lack else "more nodes"
    return f"{text} It fits with {wanted} ({flags}), or with {more}."


def _listed(parts: Iterable[str]) -> str:
    found = list(parts)
    return " and ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)
