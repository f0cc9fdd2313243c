"""The codec of quantized wires, by its properties: for any bits that a float may have, whatever lies beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onefold.comm.codec import BLOCK, TINY, Codec

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
CODECS = [Codec(8), Codec(4), Codec(8, 8), Codec(4, 8)]

settings.register_profile("codec", max_examples=60, deadline=None, derandomize=True, database=None)
given_cases = settings.get_profile("codec")


# -- what blocks may hold ---------------------------------------------------------------------------------------


def zeros(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Of both signs."""
    return torch.zeros(shape) * torch.randn(shape, generator=generator).sign()


def normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator) * 10.0 ** float(torch.randint(-6, 4, (), generator=generator))


def mixed(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Every magnitude that fp32 has, subnormal ones too."""
    powers = torch.randint(-149, 128, shape, generator=generator)
    return torch.randn(shape, generator=generator).sign() * torch.exp2(powers.double()).float()


def subnormal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    bits = torch.randint(0, 1 << 23, shape, generator=generator, dtype=torch.int32)
    return bits.view(torch.float32) * torch.randn(shape, generator=generator).sign()


def huge(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """The largest finite numbers, of whatever dtype they become."""
    return torch.randn(shape, generator=generator).sign() * torch.finfo(torch.float32).max


def around_tiny(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return TINY * (1 + torch.randn(shape, generator=generator) * 1e-6)


def halves(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """On the edges between two integers, and next to them."""
    whole = torch.randint(-127, 127, shape, generator=generator) + 0.5
    return torch.nextafter(whole, whole + torch.randint(-1, 2, shape, generator=generator)) / 127


def any_bits(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Finite ones."""
    bits = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).to(torch.int32)
    return torch.nan_to_num(bits.view(torch.float32), nan=1.0, posinf=2.0, neginf=-3.0)


KINDS = [zeros, normal, mixed, subnormal, huge, around_tiny, halves, any_bits]


@st.composite
def coded(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = tuple(BITS)) -> tuple[Codec, torch.Tensor]:
    """A codec, and finite rows of blocks of several kinds."""
    codec = draw(st.sampled_from(CODECS))
    dtype = draw(st.sampled_from(dtypes))
    num_rows, num_blocks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    if codec.block == BLOCK or draw(st.booleans()):
        kinds = [draw(st.sampled_from(KINDS)) for _ in range(num_rows * num_blocks)]
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
        flat = torch.stack([kind((codec.block,), generator) for kind in kinds])
    else:
        number = st.floats(width=32, allow_nan=False, allow_infinity=False)
        size = num_rows * num_blocks * codec.block
        flat = torch.tensor(draw(st.lists(number, min_size=size, max_size=size)))
    largest = torch.finfo(dtype).max
    return codec, flat.clamp(-largest, largest).to(dtype).view(num_rows, num_blocks * codec.block)


def scales_of(codec: Codec, data: torch.Tensor) -> torch.Tensor:
    """One a block: they follow a row's integers."""
    size = codec.values_in(data.shape[1]) * codec.bits // 8
    return data[:, size:].contiguous().view(torch.float32)


def there_and_back(codec: Codec, rows: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(rows))


def in_blocks(codec: Codec, rows: torch.Tensor) -> torch.Tensor:
    return rows.reshape(rows.shape[0], -1, codec.block)


def same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """NaN is NaN; zeros of both signs are one."""
    return torch.equal(mine.isnan(), theirs.isnan()) and torch.equal(mine.nan_to_num(), theirs.nan_to_num())


# -- how near, and what is exact --------------------------------------------------------------------------------


@given_cases
@given(coded())
@example((Codec(8), torch.full((1, BLOCK), torch.finfo(torch.float32).max)))
@example((Codec(4), torch.full((1, BLOCK), TINY)))
def test_values_come_back_within_half_a_step(case):
    """|x - x'| <= scale (1/2 + (5 limit + 3) 2^-24).

    Half a step is what rounding to an integer loses. Five operations round as well, each by a factor 1 + e with
    |e| <= u = 2^-24: the inverse and the product before that rounding; 1 / limit, the scale and the product after it.
    So x' = (x (1+e)^2 + d amax / limit)(1+e)^3 with |d| <= 1/2, and as |x| <= amax = limit (amax / limit),
    |x - x'| <= (amax / limit)(1/2 + (5 limit + 3/2) u) and terms in u^2; the scale that is stored may be smaller than
    amax / limit by 2 u of it, which adds u to the bracket.
    """
    codec, rows = case
    data = codec.encode(rows)
    scale = scales_of(codec, data).double().unsqueeze(-1)
    lost = (in_blocks(codec, rows).double() - in_blocks(codec, codec.decode(data)).double()).abs()
    held = lost <= scale * (0.5 + (5 * codec.limit + 3) * 2.0**-24)
    assert (held | (scale == 0)).all()
    # No scale: nothing in the block is as large as TINY, and it comes back as zeros.
    largest = in_blocks(codec, rows).float().abs().amax(-1, keepdim=True)
    assert torch.equal(scale == 0, largest < TINY)
    assert (lost < TINY)[(scale == 0).expand_as(lost)].all()


@given_cases
@given(coded())
def test_coding_again_changes_no_integer_and_no_scale_by_more_than_its_last_place(case):
    codec, rows = case
    size = rows.shape[1] * codec.bits // 8
    first = codec.encode(rows)
    again = codec.encode(codec.decode(first))
    assert torch.equal(again[:, :size], first[:, :size])
    steps = scales_of(codec, again).view(torch.int32) - scales_of(codec, first).view(torch.int32)
    assert steps.abs().max() <= 1


@given_cases
@given(coded())
def test_order_is_kept(case):
    codec, rows = case
    blocks, back = in_blocks(codec, rows), in_blocks(codec, there_and_back(codec, rows))
    order = blocks.argsort(-1)
    assert (back.gather(-1, order).diff(dim=-1) >= 0).all()


@given_cases
@given(coded())
def test_signs_are_symmetric(case):
    codec, rows = case
    assert same(there_and_back(codec, -rows), -there_and_back(codec, rows))


@given_cases
@given(coded([torch.float32]), st.integers(-20, 20))
def test_powers_of_two_pass_through(case, power):
    """Away from where fp32 ends, at both of its ends."""
    codec, rows = case
    near = (rows.abs() >= 2.0**-60) & (rows.abs() <= 2.0**60)
    rows = torch.where(near, rows, torch.zeros_like(rows))
    factor = 2.0**power
    data, scaled = codec.encode(rows), codec.encode(rows * factor)
    size = rows.shape[1] * codec.bits // 8
    assert torch.equal(scaled[:, :size], data[:, :size])
    assert torch.equal(scales_of(codec, scaled), scales_of(codec, data) * factor)
    assert torch.equal(codec.decode(scaled), codec.decode(data) * factor)


@given_cases
@given(coded())
def test_integers_within_the_limit_are_exact(case):
    """Where the largest value is the limit times a power of two, the step is that power."""
    codec, rows = case
    step = 2.0 ** (rows.shape[1] % 7 - 3)
    integers = in_blocks(codec, rows.float().nan_to_num().clamp(-1, 1) * codec.limit).round()
    integers[..., 0] = codec.limit
    rows = (integers * step).view(rows.shape)
    assert torch.equal(there_and_back(codec, rows), rows)


# -- blocks keep to themselves ----------------------------------------------------------------------------------


@given_cases
@given(coded(), st.sampled_from([math.inf, -math.inf, math.nan]), st.integers(0, 10**6), st.booleans())
def test_an_overflow_makes_its_block_nan_and_no_other(case, wrong, place, twice):
    codec, rows = case
    broken = rows.clone().view(-1)
    places = [place % broken.numel()] + [(7 * place + 3) % broken.numel()] * twice
    for index in places:
        broken[index] = wrong
    back = in_blocks(codec, there_and_back(codec, broken.view(rows.shape)))
    hit = torch.zeros(rows.numel(), dtype=torch.bool)
    hit[places] = True
    hit = in_blocks(codec, hit.view(rows.shape)).any(-1)
    assert back[hit].isnan().all()
    assert torch.equal(back[~hit], in_blocks(codec, there_and_back(codec, rows))[~hit])
    # And so it stays, when it is coded again.
    assert torch.equal(in_blocks(codec, there_and_back(codec, back.view(rows.shape))).isnan(), back.isnan())


@given_cases
@given(coded())
def test_rows_are_coded_by_themselves(case):
    codec, rows = case
    data = codec.encode(rows)
    for index in range(rows.shape[0]):
        assert torch.equal(codec.encode(rows[index : index + 1]), data[index : index + 1])
        assert torch.equal(codec.decode(data[index : index + 1]), codec.decode(data)[index : index + 1])


@given_cases
@given(coded())
def test_blocks_are_coded_by_themselves(case):
    codec, rows = case
    whole = in_blocks(codec, there_and_back(codec, rows))
    for index in range(whole.shape[1]):
        block = rows[:, index * codec.block : (index + 1) * codec.block].contiguous()
        assert torch.equal(there_and_back(codec, block), whole[:, index])


@given_cases
@given(coded())
def test_only_values_count_not_how_they_lie(case):
    """A wider dtype, a view with strides, pieces of a row, memory that is given: the same bytes, and nothing written
    but the bytes.
    """
    codec, rows = case
    before, data = rows.clone(), codec.encode(rows)
    assert torch.equal(codec.encode(rows.float()), data)
    assert torch.equal(codec.encode(rows.t().contiguous().t()), data)
    assert torch.equal(codec.encode(in_blocks(codec, rows)), data)
    pieces = in_blocks(codec, rows).transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(codec.encode(pieces), data)
    around = torch.full((rows.shape[0] + 2, data.shape[1]), 0xAB, dtype=torch.uint8)
    codec.encode(rows, around[1:-1])
    assert torch.equal(around[1:-1], data)
    assert (around[[0, -1]] == 0xAB).all()
    assert torch.equal(rows.view(BITS[rows.dtype]), before.view(BITS[rows.dtype]))


@given_cases
@given(coded())
def test_what_is_decoded_may_be_rounded_on_the_way(case):
    codec, rows = case
    data = codec.encode(rows)
    for dtype in BITS:
        out = torch.empty(rows.shape, dtype=dtype)
        assert codec.decode(data, out) is out
        assert torch.equal(out, codec.decode(data).to(dtype))


@given_cases
@given(coded())
def test_sums_are_those_of_the_decoded_rows_in_their_order(case):
    codec, rows = case
    data = codec.encode(rows)
    total = torch.zeros(rows.shape[1])
    for row in codec.decode(data):
        total = total + row
    assert same(codec.add(data), total)
    for other in CODECS:
        if codec.block % other.block == 0:
            assert torch.equal(codec.recode(data, other, 1), other.encode(total.view(1, -1)))


# -- bytes ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 1 << 20), st.sampled_from(CODECS))
@settings(given_cases, max_examples=30)
def test_row_bytes_are_integers_and_a_scale_a_block(num_blocks, codec):
    numel = num_blocks * codec.block
    assert codec.row_bytes(numel) == numel * codec.bits // 8 + 4 * num_blocks
    assert codec.values_in(codec.row_bytes(numel)) == numel
    # A shard never ends inside a block.
    assert 2048 % Codec(codec.bits).block == 0


@given_cases
@given(coded())
def test_bytes_are_as_many_as_promised(case):
    codec, rows = case
    data = codec.encode(rows)
    assert data.dtype is torch.uint8
    assert data.shape == (rows.shape[0], codec.row_bytes(rows.shape[1]))
    back = codec.decode(data)
    assert back.dtype is torch.float32
    assert back.shape == rows.shape


def test_a_row_that_ends_inside_a_block_is_refused():
    with pytest.raises(AssertionError, match="end with a block"):
        Codec(8).encode(torch.zeros(1, BLOCK + 1))


def test_every_byte_of_int8_means_itself():
    data = torch.cat([torch.arange(256).to(torch.uint8), torch.tensor([0.5]).view(torch.uint8)]).view(1, -1)
    expected = torch.arange(256).to(torch.uint8).view(torch.int8).float() * 0.5
    assert torch.equal(Codec(8).decode(data)[0], expected)


def test_every_byte_of_int4_is_two_numbers_the_first_in_its_lower_half():
    data = torch.cat([torch.arange(256).to(torch.uint8), torch.tensor([0.5, 2.0]).view(torch.uint8)]).view(1, -1)
    signed = [number - 16 if number > 7 else number for number in range(16)]
    expected = torch.tensor([signed[half] for byte in range(256) for half in (byte & 15, byte >> 4)]).float()
    expected[:BLOCK] *= 0.5
    expected[BLOCK:] *= 2.0
    assert torch.equal(Codec(4).decode(data)[0], expected)


def test_every_pair_of_int4_is_packed_into_one_byte():
    codec = Codec(4, 8)
    pairs = [(low, high) for low in range(-7, 8) for high in range(-7, 8)]
    # Three pairs a block; the fourth has the limit in it, so that a step is 1.
    rows = torch.tensor([[number for pair in pairs[i : i + 3] for number in pair] + [7, -7] for i in range(0, 225, 3)])
    data = codec.encode(rows.float())
    packed = [(low & 15) | (high & 15) << 4 for low, high in pairs]
    assert data[:, :3].flatten().tolist() == packed
    assert (data[:, 3] == (7 | (-7 & 15) << 4)).all()
    assert torch.equal(codec.decode(data), rows.float())


@pytest.mark.parametrize("codec", CODECS[:2], ids=["int8", "int4"])
def test_nothing_is_coded_as_nothing(codec):
    """A run may have no elements at all."""
    data = codec.encode(torch.empty(3, 0))
    assert data.shape == (3, 0)
    assert codec.decode(data).shape == (3, 0)
