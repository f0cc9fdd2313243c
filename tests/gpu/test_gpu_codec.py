"""Triton's kernels give what the codec specifies, to the bit."""

from __future__ import annotations

import pytest
import torch

from onefold.comm import codec as room
from onefold.comm.codec import Codec
from onefold.comm.tree import add_tree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
CODECS = [Codec(8), Codec(4)]


@pytest.fixture
def specified(monkeypatch):
    """What torch makes of it, on the same device."""

    def run(call):
        with monkeypatch.context() as patch:
            patch.setattr(room, "_kernels", lambda tensor: None)
            return call()

    return run


def values(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(shape, device="cuda", generator=generator)
    if kind == "scales":
        x *= torch.logspace(-34, 34, x.shape[-1], device="cuda")
    elif kind == "halves":  # between two integers
        x = (x * 40).round() / 2
        x[..., ::256] = 63.5
    elif kind == "odd":
        x[..., 5] = torch.inf
        x[..., 300] = -torch.inf
        x[..., 777] = torch.nan
        x[..., 1024:1536] = 0
        x[..., 1536:1792] = 1e-38
    return x.to(dtype)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Bit for bit; a NaN is a NaN."""
    if first.is_floating_point():
        gone = first.isnan()
        return torch.equal(gone, second.isnan()) and torch.equal(first[~gone], second[~gone])
    return torch.equal(first, second)


def scales_and_integers(codec: Codec, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = codec.values_in(data.shape[1]) * codec.bits // 8
    return data[:, :size], data[:, size:].contiguous().view(torch.float32)


@pytest.mark.parametrize("codec", CODECS, ids=["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["plain", "scales", "halves", "odd"])
def test_kernels_equal_the_specification(codec, dtype, kind, specified):
    assert room._kernels(torch.empty(1, device="cuda")) is not None
    x = values(kind, (3, 2048 * 5 + 256), dtype)
    data, wanted = codec.encode(x), specified(lambda: codec.encode(x))
    for got, expected in zip(scales_and_integers(codec, data), scales_and_integers(codec, wanted), strict=True):
        assert same(got, expected)
    for target in (torch.float32, torch.bfloat16, torch.float16):
        out = torch.empty(x.shape, dtype=target, device="cuda")
        expected = torch.empty_like(out)
        codec.decode(data, out)
        specified(lambda expected=expected: codec.decode(data, expected))
        assert same(out, expected)
    assert same(codec.add(data), specified(lambda: codec.add(data)))


@pytest.mark.parametrize("inside", CODECS, ids=["int8", "int4"])
@pytest.mark.parametrize("across", CODECS, ids=["int8", "int4"])
def test_recoding_equals_the_specification(inside, across, specified):
    x = values("plain", (4, 6 * 2048), torch.bfloat16)
    data = inside.encode(x)
    for num_rows in (1, 2, 3):
        got = inside.recode(data, across, num_rows)
        assert same(got, specified(lambda num_rows=num_rows: inside.recode(data, across, num_rows)))


@pytest.mark.parametrize("codec", CODECS, ids=["int8", "int4"])
def test_rows_in_pieces(codec, specified):
    line = values("plain", (3, 4, 2048), torch.bfloat16)
    rows = line.transpose(0, 1)
    assert same(codec.encode(rows), specified(lambda: codec.encode(rows.reshape(4, -1))))
    out = torch.zeros(6, codec.row_bytes(3 * 2048), dtype=torch.uint8, device="cuda")
    codec.encode(rows[1:2], out[3:4])
    assert same(out[3:4], codec.encode(rows)[1:2])
    assert not out[4:].any()


@pytest.mark.parametrize("codec", CODECS, ids=["int8", "int4"])
def test_cpu_and_gpu_agree(codec):
    x = values("plain", (2, 4096), torch.bfloat16)
    assert same(codec.encode(x).cpu(), codec.encode(x.cpu()))


def test_without_triton_torch_codes_and_says_so(monkeypatch, caplog):
    import sys

    monkeypatch.setitem(sys.modules, "onefold.comm.kernels", None)
    monkeypatch.delattr("onefold.comm.kernels", raising=False)
    room._kernels.forget()
    try:
        with caplog.at_level("WARNING", logger="onefold"):
            x = values("plain", (1, 256), torch.float32)
            back = Codec(8).decode(Codec(8).encode(x))
        assert "Triton kernels are not available" in caplog.text
        assert (back - x).abs().max() < 0.05
    finally:
        room._kernels.forget()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num", [1, 2, 3, 5, 6, 7, 8, 9, 13])
def test_sums_over_ranks_are_those_of_the_specification(num, dtype):
    """To the bit: signs of zeros, infinities, sizes that divide by nothing, targets among the pieces."""
    generator = torch.Generator().manual_seed(num)
    pieces = [torch.randn(5003, generator=generator).mul(10.0 ** (k % 3)).to(dtype) for k in range(num)]
    for piece in pieces:
        piece[:7] = torch.tensor([-0.0, -0.0, 0.0, torch.inf, -torch.inf, 1e-40, 2.0])
    for add in (False, True):
        for target in (torch.float32, torch.bfloat16):
            start = torch.randn(5003, generator=generator).to(target)
            start[0] = -0.0
            expected, found = start.clone(), start.cuda()
            add_tree(pieces, expected, add=add)
            add_tree([piece.cuda() for piece in pieces], found, add=add)
            assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8)), (add, target)
    if dtype is torch.float32:
        expected, own = torch.empty(5003), [piece.cuda() for piece in pieces]
        add_tree(pieces, expected)
        add_tree(own, own[-1])
        assert torch.equal(own[-1].cpu().view(torch.uint8), expected.view(torch.uint8))
