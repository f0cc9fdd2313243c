"""The checks of each step, and the reactions to what they find."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from onefold.config import Config, ConfigError
from onefold.config.onefold_section import GradNormSpikeSection, LossSpikeSection

NonFinite = Literal["raise", "skip", "ignore", "rollback"]


@dataclass(frozen=True)
class Guards:
    """The checks of losses, gradients and replicas."""

    nonfinite: NonFinite = "raise"
    loss_spike: LossSpikeSection = field(default_factory=LossSpikeSection)
    max_rollbacks: int = 3
    replica_check_every: int | None = None
    reexecutes: bool = False
    """Suspicious steps are re-executed."""
    grad_norm_spike: GradNormSpikeSection = field(default_factory=GradNormSpikeSection)

    @property
    def may_refuse(self) -> bool:
        """Whether a step may be refused after its last gradient."""
        spikes = (self.loss_spike, self.grad_norm_spike)
        refuses_spikes = any(spike.factor is not None and spike.action != "warn" for spike in spikes)
        return self.nonfinite != "ignore" or refuses_spikes or self.replica_check_every is not None

    @property
    def reads_losses(self) -> bool:
        """Whether the ranks exchange their losses at a step."""
        return self.nonfinite == "rollback" or self.loss_spike.factor is not None


def make_guards(config: Config) -> Guards:
    """Compute the guards of a config."""
    own = config.onefold
    if own.reexecute_steps and own.step_in_backward:
        raise ConfigError(
            "onefold.reexecute_steps is not possible with onefold.step_in_backward, which steps before the last "
            "gradient is known. Change one of the two"
        )
    return Guards(
        _nonfinite(config), own.loss_spike, own.max_rollbacks, own.replica_check_every, own.reexecute_steps,
        own.grad_norm_spike,
    )  # fmt: skip


def _nonfinite(config: Config) -> NonFinite:
    """Return the handling of nonfinite gradients.

    fp16 and bf16 follow DeepSpeed. Otherwise the default is to raise, because the step would turn all weights into NaN.
    """
    requested, autocast = config.onefold.nonfinite_gradients, config.torch_autocast.enabled
    if config.fp16.enabled or (autocast and config.autocast_dtype == "fp16"):
        if requested not in ("auto", "skip"):
            raise ConfigError(
                f"onefold.nonfinite_gradients is {requested!r} with fp16: the loss scale is found by gradients that "
                'overflow, and such steps are always skipped. Leave it out or write "skip"'
            )
        return "skip"
    if requested != "auto":
        return requested
    if config.bf16.enabled:
        return "skip" if config.bf16.check_grad_overflow else "ignore"
    return "raise"
