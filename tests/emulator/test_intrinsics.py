"""The emulated intrinsics against exact arithmetic and the definitions in the PTX manual."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from knnpool_gen.emulator import Launch, Program, Sanitizer, build

Array = np.ndarray
FULL = 0xFFFFFFFF


@pytest.fixture(scope="module", params=[Sanitizer.NONE, Sanitizer.ADDRESS], ids=lambda sanitizer: sanitizer.value)
def program(request: pytest.FixtureRequest) -> Program:
    return build(Path(__file__).parent / "kernels" / "intrinsics.cu", request.param)


def elementwise(program: Program, kernel: str, n: int, *arrays: Array) -> None:
    """Runs a kernel that gives each of n numbers to one thread."""
    program.run(kernel, [Launch((n + 255) // 256, 256, 0, (*arrays, np.int32(n)))])


class Format:
    """A binary floating-point type with 16 bits."""

    def __init__(self, exponent_bits: int, mantissa_bits: int) -> None:
        self.mantissa_bits = mantissa_bits
        self.bias = 2 ** (exponent_bits - 1) - 1
        self.infinity = (2**exponent_bits - 1) << mantissa_bits

    def decode(self, bits: int) -> float:
        """The value, which a Python float always holds."""
        sign = -1.0 if bits & 0x8000 else 1.0
        magnitude = bits & 0x7FFF
        if magnitude > self.infinity:
            return float("nan")
        if magnitude == self.infinity:
            return sign * float("inf")
        exponent, mantissa = divmod(magnitude, 1 << self.mantissa_bits)
        if exponent:
            mantissa += 1 << self.mantissa_bits
        return sign * mantissa * 2.0 ** (max(exponent, 1) - self.bias - self.mantissa_bits)

    def encode(self, value: Fraction, negative_zero: bool = False) -> int:
        """The bits of the nearest value, the even one of two; exact whatever ``value`` is."""
        if value == 0:
            return 0x8000 if negative_zero else 0
        sign = 0x8000 if value < 0 else 0
        value = abs(value)
        exponent = 1 - self.bias
        while value >= Fraction(2) ** (exponent + 1):
            exponent += 1
        unit = Fraction(2) ** (exponent - self.mantissa_bits)
        rounded = round(value / unit)  # Python rounds halves to even
        return sign | min(((exponent + self.bias - 1) << self.mantissa_bits) + rounded, self.infinity)


HALF = Format(5, 10)
BFLOAT16 = Format(8, 7)
FORMATS = pytest.mark.parametrize(
    ("kind", "kernel"), [(HALF, "half_arithmetic"), (BFLOAT16, "bfloat16_arithmetic")], ids=["half", "bfloat16"]
)


def test_the_oracle_agrees_with_numpy() -> None:
    bits = np.arange(0x10000, dtype=np.uint16)
    np.testing.assert_array_equal([HALF.decode(int(b)) for b in bits], bits.view(np.float16).astype(float))
    values = np.random.default_rng(0).standard_normal(300) * 2.0 ** np.arange(-150, 150)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16).view(np.uint16)
    assert [HALF.encode(Fraction(v), v < 0) for v in values] == expected.tolist()


def test_widening_is_exact_for_all_values(program: Program) -> None:
    bits = np.arange(0x10000, dtype=np.uint16)
    half, bfloat = np.zeros((2, len(bits)), np.float32), np.zeros((2, len(bits)), np.float32)

    elementwise(program, "widen", len(bits), bits, half, bfloat)

    for row in range(2):
        np.testing.assert_array_equal(half[row], [HALF.decode(int(b)) for b in bits])
        numbers = ~np.isnan(half[row])  # the sign of a NaN is lost, as on the device
        np.testing.assert_array_equal(np.signbit(half[row])[numbers], (bits >= 0x8000)[numbers])
        np.testing.assert_array_equal(bfloat[row], (bits.astype(np.uint32) << 16).view(np.float32))


def test_narrowing_rounds_to_nearest_even(program: Program) -> None:
    rng = np.random.default_rng(1)
    exponents = np.arange(-149, 128)
    singles = (rng.uniform(1, 2, len(exponents)) * 2.0**exponents).astype(np.float32)
    ties = np.array([v for kind in (HALF, BFLOAT16) for b in rng.integers(0, kind.infinity - 1, 150)
                     for v in [(kind.decode(int(b)) + kind.decode(int(b) + 1)) / 2]], np.float64)  # fmt: skip
    near_ties = np.concatenate([np.nextafter(ties, 0), np.nextafter(ties, np.inf)])
    largest = np.array([65504, 65519.99, 65520, 3.3895e38, 3.3961e38, 1e-45, 5.9e-8, 2.98e-8, 0.0])
    wide = np.concatenate([singles.astype(float), ties, near_ties, largest])
    wide = np.concatenate([wide, -wide])
    with np.errstate(over="ignore", under="ignore"):
        x = wide.astype(np.float32)
    n = len(wide)
    half, bfloat, single = np.zeros((3, n), np.uint16), np.zeros((3, n), np.uint16), np.zeros(n, np.float32)

    elementwise(program, "narrow", n, x, wide, half, bfloat, single)

    def nearest(kind: Format, values: Array) -> list[int]:
        infinity = [kind.infinity, kind.infinity | 0x8000]
        return [kind.encode(Fraction(float(v)), np.signbit(v)) if np.isfinite(v) else infinity[v < 0] for v in values]

    for kind, got in ((HALF, half), (BFLOAT16, bfloat)):
        assert got[0].tolist() == nearest(kind, x)
        assert got[1].tolist() == nearest(kind, wide)
        assert got[2].tolist() == nearest(kind, x)
    np.testing.assert_array_equal(single.view(np.uint32), x.view(np.uint32))


def test_narrowing_keeps_what_is_no_number(program: Program) -> None:
    wide = np.array([np.nan, np.inf, -np.inf, -np.nan])
    half, bfloat, single = np.zeros((3, 4), np.uint16), np.zeros((3, 4), np.uint16), np.zeros(4, np.float32)

    elementwise(program, "narrow", 4, wide.astype(np.float32), wide, half, bfloat, single)

    for kind, got in ((HALF, half), (BFLOAT16, bfloat)):
        decoded = np.array([[kind.decode(int(b)) for b in row] for row in got])
        np.testing.assert_array_equal(decoded, np.broadcast_to(wide, (3, 4)))
    np.testing.assert_array_equal(single, wide)


@FORMATS
def test_narrow_arithmetic_is_correctly_rounded(program: Program, kind: Format, kernel: str) -> None:
    rng = np.random.default_rng(2)
    n = 1500
    # Neighbouring exponents, so that sums round; and denormals, so that products do.
    a, b, c = (rng.integers(0, kind.infinity, n) | (rng.integers(0, 2, n) << 15) for _ in range(3))
    a[: n // 2] = b[: n // 2] ^ rng.integers(0, 0x400, n // 2)
    a[a & 0x7FFF >= kind.infinity] = 1
    a[:100] %= 1 << kind.mantissa_bits
    c[100:400] = [
        kind.encode(Fraction(-kind.decode(int(p)) * kind.decode(int(q))), False)
        for p, q in zip(a[100:400], b[100:400], strict=True)
    ]
    c[c & 0x7FFF == kind.infinity] = 0
    a, b, c = (v.astype(np.uint16) for v in (a, b, c))
    out, masks = np.zeros((9, n), np.uint16), np.zeros((2, n), np.uint32)

    elementwise(program, kernel, n, a, b, c, out, masks)

    values = [[Fraction(kind.decode(int(bits))) for bits in column] for column in (a, b, c)]
    for i, (p, q, r) in enumerate(zip(*values, strict=True)):
        total = kind.encode(p + q, a[i] >= 0x8000 and b[i] >= 0x8000)
        negative = (a[i] ^ b[i]) >= 0x8000
        product = kind.encode(p * q, negative)
        fused = kind.encode(p * q + r, negative and c[i] >= 0x8000)
        assert out[:5, i].tolist() == [total, total, product, fused, fused], (a[i], b[i], c[i])
        if p != q:
            assert out[5, i] == out[6, i] == (a[i] if p > q else b[i])
        assert out[7, i] == (p > q)
        assert masks[0, i] == (0xFFFF if p > q else 0) | (0xFFFF0000 if q > p else 0)
        assert masks[1, i] == (FULL if p == q else 0)
    assert not out[8].any()


@FORMATS
def test_what_is_no_number_in_narrow_arithmetic(program: Program, kind: Format, kernel: str) -> None:
    one, nan, infinity = kind.encode(Fraction(1)), kind.infinity | 1, kind.infinity
    a = np.array([nan, one, nan, infinity, infinity, one], np.uint16)
    b = np.array([one, nan, nan, infinity | 0x8000, one, infinity | 0x8000], np.uint16)
    n = len(a)
    out, masks = np.zeros((9, n), np.uint16), np.zeros((2, n), np.uint32)

    elementwise(program, kernel, n, a, b, np.full(n, one, np.uint16), out, masks)

    decoded = np.array([[kind.decode(int(bits)) for bits in row] for row in out])
    nan_, inf = np.nan, np.inf
    np.testing.assert_array_equal(decoded[0], [nan_, nan_, nan_, nan_, inf, -inf])  # a + b
    np.testing.assert_array_equal(decoded[2], [nan_, nan_, nan_, -inf, inf, -inf])  # a * b
    np.testing.assert_array_equal(decoded[3], [nan_, nan_, nan_, -inf, inf, -inf])  # a * b + 1
    np.testing.assert_array_equal(decoded[5], [1, 1, nan_, inf, inf, 1])  # max: the number
    np.testing.assert_array_equal(decoded[6], [nan_, nan_, nan_, inf, inf, 1])  # max_nan: the NaN
    assert out[7].tolist() == [0, 0, 0, 1, 1, 1]
    assert out[8].tolist() == [1, 0, 1, 0, 0, 0]
    assert masks[0].tolist() == [0, 0, 0, 0xFFFF, 0xFFFF, 0xFFFF]
    assert masks[1].tolist() == [0] * n


@pytest.mark.parametrize(("kernel", "dtype"), [("float_arithmetic", np.float32), ("double_arithmetic", np.float64)])
def test_wide_arithmetic(program: Program, kernel: str, dtype: type) -> None:
    rng = np.random.default_rng(3)
    n = 400
    info = np.finfo(dtype)
    a, b, c = (rng.standard_normal(n).astype(dtype) for _ in range(3))
    c[:200] = -(a[:200] * b[:200])  # cancels but for what the product lost
    a[200:300] *= info.tiny  # products and quotients that are denormal
    a[300], b[301], a[302] = np.nan, np.nan, np.inf
    out = np.zeros((8, n), dtype)

    elementwise(program, kernel, n, a, b, c, out)

    with np.errstate(all="ignore"):
        expected = [a + b, a - b, a * b, a / b, None, a * b + c, np.fmin(a, b), np.fmax(a, b)]
    for got, want in zip(out, expected, strict=True):
        if want is not None:
            np.testing.assert_array_equal(got, want)
    finite = np.isfinite(a) & np.isfinite(b)
    exact = [
        Fraction(float(p)) * Fraction(float(q)) + Fraction(float(r))
        for p, q, r in zip(a[finite], b[finite], c[finite], strict=True)
    ]
    assert out[4][finite].tolist() == [nearest_in(dtype, value) for value in exact]
    assert (np.abs(out[2][200:300]) < info.tiny).any(), "denormal products are kept"


def nearest_in(dtype: type, value: Fraction) -> float:
    """The nearest value of the type, the even one of two."""
    nearest = dtype(float(value))  # at most one step away
    around = [np.nextafter(nearest, dtype(-np.inf)), nearest, np.nextafter(nearest, dtype(np.inf))]
    odd = [int(v.view(f"u{v.itemsize}")) & 1 for v in around]
    _, _, best = min((abs(Fraction(float(v)) - value), o, float(v)) for v, o in zip(around, odd, strict=True))
    return best


def test_byte_perm(program: Program) -> None:
    rng = np.random.default_rng(4)
    x, y, selector = (rng.integers(0, 2**32, 2000, dtype=np.uint32) for _ in range(3))
    selector[:4] = [0x5410, 0x7632, 0x3210, 0x0123]
    out = np.zeros(len(x), np.uint32)

    elementwise(program, "permute", len(x), x, y, selector, out)

    for i in range(len(x)):
        source = int(x[i]).to_bytes(4, "little") + int(y[i]).to_bytes(4, "little")
        nibbles = [int(selector[i]) >> shift & 15 for shift in (0, 4, 8, 12)]
        picked = [source[nibble & 7] for nibble in nibbles]
        signed = [
            (0xFF if byte > 127 else 0) if nibble & 8 else byte for byte, nibble in zip(picked, nibbles, strict=True)
        ]
        assert int(out[i]) == int.from_bytes(bytes(signed), "little")


def test_bits_and_integers(program: Program) -> None:
    rng = np.random.default_rng(5)
    x = np.concatenate([np.array([0, 1, FULL, 1 << 31], np.uint32), rng.integers(0, 2**32, 100, dtype=np.uint32)])
    n = len(x)
    f, d = rng.standard_normal(n).astype(np.float32), rng.standard_normal(n)
    out, wide = np.zeros((8, n), np.uint32), np.zeros((2, n), np.int64)

    elementwise(program, "integers", n, x, f, d, out, wide)

    numbers = [int(v) for v in x]
    assert out[0].tolist() == [v.bit_count() for v in numbers]
    assert out[1].tolist() == [32 - v.bit_length() for v in numbers]
    assert out[2].tolist() == [(v & -v).bit_length() for v in numbers]
    assert out[3].tolist() == out[4].tolist() == f.view(np.uint32).tolist()
    assert out[5].tolist() == out[7].tolist() == numbers
    assert out[6].tolist() == [max(v, 7) for v in numbers]
    assert wide[0].tolist() == d.view(np.int64).tolist()
    assert wide[1].tolist() == [min(int(v), 5) for v in d.view(np.int64)]


def shuffle_source(kind: str, lane: int, argument: int, width: int) -> int:
    """The lane that is read: the pseudocode of `shfl.sync` in the PTX manual, as `__shfl_*_sync` uses it."""
    segment_mask = 32 - width
    clamp = 0 if kind == "up" else 31
    bits = argument & 31
    min_lane = lane & segment_mask
    max_lane = min_lane | (clamp & ~segment_mask & 31)
    if kind == "up":
        source, inside = lane - bits, lane - bits >= max_lane
    elif kind == "down":
        source, inside = lane + bits, lane + bits <= max_lane
    elif kind == "xor":
        source, inside = lane ^ bits, lane ^ bits <= max_lane
    else:
        source = min_lane | (bits & ~segment_mask & 31)
        inside = source <= max_lane
    return source if inside else lane


@pytest.mark.parametrize("width", [32, 16, 8, 4, 2, 1])
def test_shuffles(program: Program, width: int) -> None:
    threads = 64
    values = np.random.default_rng(6).integers(0, 2**32, threads, dtype=np.uint32)
    out = np.zeros((4, 32, threads), np.uint32)

    program.run("shuffles", [Launch(1, threads, 0, (values, out, np.int32(width)))])

    for plane, kind in enumerate(("index", "up", "down", "xor")):
        sources = [[t // 32 * 32 + shuffle_source(kind, t % 32, a, width) for t in range(threads)] for a in range(32)]
        np.testing.assert_array_equal(out[plane], values[sources], err_msg=kind)


def test_shuffles_move_every_type(program: Program) -> None:
    pairs, wide, integers = np.zeros((32, 2), np.float16), np.zeros(32), np.zeros(32, np.int64)

    program.run("shuffle_types", [Launch(1, 32, 0, (pairs, wide, integers))])

    neighbour = np.arange(32) ^ 1
    np.testing.assert_array_equal(pairs, np.stack([neighbour, np.full(32, -1)], axis=1))
    np.testing.assert_array_equal(wide, neighbour + 0.25)
    np.testing.assert_array_equal(integers, neighbour + 2**40)


@pytest.mark.parametrize("threads", [64, 40])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_votes_of_a_warp(program: Program, threads: int, share: float) -> None:
    p = (np.random.default_rng(7).random(threads) < share).astype(np.int32) * 3
    ballot, active = np.zeros(threads, np.uint32), np.zeros(threads, np.uint32)
    any_, all_ = np.zeros(threads, np.int32), np.zeros(threads, np.int32)

    program.run("votes", [Launch(1, threads, 0, (p, ballot, any_, all_, active))])

    for t in range(threads):
        warp = range(t // 32 * 32, min(t // 32 * 32 + 32, threads))
        voters = [other for other in warp if other % 2 == t % 2]
        assert ballot[t] == sum(1 << other % 32 for other in voters if p[other])
        assert bool(any_[t]) == any(p[other] for other in voters)
        assert bool(all_[t]) == all(p[other] for other in voters)
        assert active[t] == sum(1 << other % 32 for other in warp)


def test_votes_of_a_block(program: Program) -> None:
    threads = 48
    p = np.stack([np.arange(threads) % 3 == 0, np.zeros(threads), np.ones(threads)]).astype(np.int32)
    count, any_, all_ = (np.zeros((3, threads), np.int32) for _ in range(3))

    program.run("block_votes", [Launch(1, threads, 0, (p, count, any_, all_))])

    np.testing.assert_array_equal(count, np.broadcast_to(p.sum(1, keepdims=True), p.shape))
    np.testing.assert_array_equal(any_ != 0, np.broadcast_to(p.any(1, keepdims=True), p.shape))
    np.testing.assert_array_equal(all_ != 0, np.broadcast_to(p.all(1, keepdims=True), p.shape))


@pytest.mark.parametrize("sanitizer", Sanitizer, ids=lambda sanitizer: sanitizer.value)
def test_atomics(sanitizer: Sanitizer) -> None:
    counters = np.array([5, 1000, 0, 0, 0, 0], np.uint32)
    total, extremes, wide = np.zeros(1, np.float32), np.zeros(2, np.int32), np.zeros(1, np.uint64)
    source = Path(__file__).parent / "kernels" / "intrinsics.cu"

    build(source, sanitizer).run("atomics", [Launch(3, 40, 0, (counters, total, extremes, wide), concurrent=3)])

    parity = 0
    for t in [*range(40)] * 3:
        parity ^= t
    assert counters.tolist() == [125, 880, FULL, parity, 1, 77]
    assert total[0] == 60
    assert extremes.tolist() == [39, -39]
    assert wide[0] == 120 << 33


@pytest.mark.parametrize("reverse", [False, True])
def test_positions(program: Program, reverse: bool) -> None:
    out = np.zeros(3 * 40, np.uint32)

    program.run("positions", [Launch(3, 40, 0, (out,), reverse=reverse)])

    assert out.tolist() == [(b << 20) | (t << 10) | (3 << 5) | (40 & 31) for b in range(3) for t in range(40)]
