"""A flat fp32 tensor that is held in another form, in memory or on disk ([Note: forms of states])."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onefold.offload.nvme import DiskTensor
from onefold.offload.state_codec import Dither, decode, encode
from onefold.plan.forms import Form
from onefold.plan.layout import round_up


class EncodedFlat:
    """Values in the parts of a form, or a range of them. A range begins at a block; it may end within one, if what is
    left of that block is padding.
    """

    dtype = torch.float32
    itemsize = torch.float32.itemsize

    def __init__(self, form: Form, parts: Sequence[torch.Tensor | DiskTensor], numel: int) -> None:
        self.form, self.parts, self._numel = form, tuple(parts), numel

    def numel(self) -> int:
        return self._numel

    @property
    def nbytes(self) -> int:
        """Of the values, as they are read. `held_bytes` says what is held."""
        return self._numel * self.itemsize

    @property
    def is_on_disk(self) -> bool:
        return any(isinstance(part, DiskTensor) for part in self.parts)

    @property
    def device(self) -> torch.device:
        part = self.parts[0]
        return part.device if isinstance(part, torch.Tensor) else torch.device("cpu")

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def __getitem__(self, index: slice) -> EncodedFlat:
        begin, end, step = index.indices(self._numel)
        assert step == 1
        pairs = zip(self.parts, self.form.parts, strict=True)
        whole = round_up(max(begin, end), self.form.block)
        assert begin % self.form.block == 0, "a range of encoded values begins at a block"
        parts = [part[begin // made.values : whole // made.values] for part, made in pairs]
        return EncodedFlat(self.form, parts, max(0, end - begin))

    def split(self, num_elements: int) -> list[EncodedFlat]:
        """Like `torch.split`: the last one may be shorter."""
        return [self[begin : begin + num_elements] for begin in range(0, self._numel, num_elements)]

    def load(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """The values, where the parts are. `out` has room for whole blocks."""
        whole = round_up(self._numel, self.form.block)
        values = torch.empty(whole, dtype=self.dtype, device=self.device) if out is None else out[:whole]
        decode(self.form, self._in_memory(), values)
        return values[: self._numel]

    def store(self, values: torch.Tensor, dither: Dither | None = None) -> None:
        """Take these values, rounded as the form rounds."""
        values = values.to(self.device, self.dtype)
        whole = round_up(self._numel, self.form.block)
        if values.numel() < whole:
            values = torch.cat([values, values.new_zeros(whole - values.numel())])
        if not self.is_on_disk:
            encode(self.form, values, self._in_memory(), dither)
            return
        here = [_memory_like(part) for part in self.parts]
        encode(self.form, values, here, dither)
        for part, memory in zip(self.parts, here, strict=True):
            if isinstance(part, DiskTensor):
                part.store(memory)
            else:
                part.copy_(memory)

    def _in_memory(self) -> list[torch.Tensor]:
        return [part if isinstance(part, torch.Tensor) else part.load() for part in self.parts]


def _memory_like(part: torch.Tensor | DiskTensor) -> torch.Tensor:
    return torch.empty(part.numel(), dtype=part.dtype)
