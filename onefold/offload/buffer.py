"""One tensor of a shard's training state: elements stored in one format, in memory or on NVMe.

[Note: buffers]
A parameter shard, its master weight and each optimizer state are all buffers. A buffer without a format stores its
values as they are, in one part. A format ([Note: state formats]) stores fp32 values in one or more parts: int8 codes
and their scales, or the bf16 and the remaining bits of a split master. Each part is a tensor in device or host memory,
or a file on NVMe. Code that moves bytes (copies, transfers, checkpoints) works on `parts`; code that computes calls
`fetch` and `store`, which decode and encode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from onefold.offload.nvme import DiskTensor
from onefold.offload.state_codec import Dither, decode, encode
from onefold.plan.layout import round_up
from onefold.plan.state_formats import StateFormat

Part = torch.Tensor | DiskTensor


class Buffer:
    """A range of elements in a format. `numel` counts values, not stored elements.

    A range of an encoded buffer begins at a block. It may end within one if the rest of that block is padding.
    """

    __slots__ = ("__weakref__", "_numel", "format", "parts")

    def __init__(self, parts: Sequence[Part], numel: int, format: StateFormat | None = None) -> None:
        self.parts = tuple(parts)
        self._numel = numel
        self.format = format

    @staticmethod
    def of(part: Part) -> Buffer:
        """Wrap a tensor, or a file, that stores its values as they are."""
        return Buffer((part,), part.numel())

    def like(self, parts: Iterator[Part]) -> Buffer:
        """Return a buffer of the same elements and format in other memory: the next of `parts`."""
        return Buffer([next(parts) for _ in self.parts], self._numel, self.format)

    def numel(self) -> int:
        """Return the number of values."""
        return self._numel

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values, as `fetch` returns them."""
        return self.parts[0].dtype if self.format is None else torch.float32

    @property
    def nbytes(self) -> int:
        """Bytes that are stored."""
        return sum(part.nbytes for part in self.parts)

    @property
    def is_encoded(self) -> bool:
        """Whether values are stored in a format, so that they must be decoded."""
        return self.format is not None

    @property
    def is_on_disk(self) -> bool:
        """Whether any part is a file."""
        return any(isinstance(part, DiskTensor) for part in self.parts)

    @property
    def device(self) -> torch.device:
        """The device of the parts. A file is read to host memory."""
        part = self.parts[0]
        return part.device if isinstance(part, torch.Tensor) else torch.device("cpu")

    @property
    def is_cuda(self) -> bool:
        """Whether the parts are on a GPU."""
        return self.device.type == "cuda"

    @property
    def is_plain_tensor(self) -> bool:
        """Whether the values are one tensor in memory, in their own dtype."""
        return self.format is None and isinstance(self.parts[0], torch.Tensor)

    @property
    def tensor(self) -> torch.Tensor:
        """The values themselves. Only for a buffer that is neither encoded nor on disk."""
        part = self.parts[0]
        assert self.format is None, "an encoded buffer has no tensor of its values"
        assert isinstance(part, torch.Tensor), "a buffer on disk has no tensor"
        return part

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The parts that are in memory."""
        return [part for part in self.parts if isinstance(part, torch.Tensor)]

    @property
    def weight(self) -> torch.Tensor:
        """The part of a master weight that the model weight is copied from: its bf16 part, or the master itself."""
        part = self.parts[0]
        assert isinstance(part, torch.Tensor), "a buffer on disk has no tensor"
        return part

    def __getitem__(self, index: slice) -> Buffer:
        begin, end, step = index.indices(self._numel)
        assert step == 1
        if begin == 0 and end == self._numel:
            return self
        if self.format is None:
            return Buffer([part[begin:end] for part in self.parts], max(0, end - begin))
        assert begin % self.format.block == 0, "a range of an encoded buffer begins at a block"
        stop = round_up(max(begin, end), self.format.block)
        pairs = zip(self.parts, self.format.parts, strict=True)
        parts = [part[begin // made.values : stop // made.values] for part, made in pairs]
        return Buffer(parts, max(0, end - begin), self.format)

    def split(self, num_elements: int) -> list[Buffer]:
        """Split into ranges of `num_elements` values. The last one may be shorter."""
        return [self[begin : begin + num_elements] for begin in range(0, self._numel, num_elements)]

    def fetch(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the values: the tensor itself, or a copy of what is on disk or encoded.

        `out` is memory for decoded values, with room for whole blocks.
        """
        if self.format is None:
            part = self.parts[0]
            return part if isinstance(part, torch.Tensor) else part.load()
        whole = round_up(self._numel, self.format.block)
        values = torch.empty(whole, dtype=torch.float32, device=self.device) if out is None else out[:whole]
        decode(self.format, [part if isinstance(part, torch.Tensor) else part.load() for part in self.parts], values)
        return values[: self._numel]

    def store(self, values: torch.Tensor, dither: Dither | None = None) -> None:
        """Overwrite the values, rounded as the format rounds."""
        if self.format is None:
            _write(self.parts[0], values)
            return
        values = values.to(self.device, torch.float32)
        whole = round_up(self._numel, self.format.block)
        if values.numel() < whole:
            values = torch.cat([values, values.new_zeros(whole - values.numel())])
        if not self.is_on_disk:
            encode(self.format, values, self.tensors, dither)
            return
        encoded = [torch.empty(part.numel(), dtype=part.dtype) for part in self.parts]
        encode(self.format, values, encoded, dither)
        for part, memory in zip(self.parts, encoded, strict=True):
            _write(part, memory)


def _write(part: Part, values: torch.Tensor) -> None:
    if isinstance(part, torch.Tensor):
        part.copy_(values.view(part.shape))
    else:
        part.store(values.to("cpu", part.dtype))
