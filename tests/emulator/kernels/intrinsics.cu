// Each kernel applies some intrinsics to many values, so that a test can compare them with the truth.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using u16 = unsigned short;
using u32 = unsigned int;

namespace {

__device__ __forceinline__ int at() { return blockIdx.x * blockDim.x + threadIdx.x; }

struct Half {
    using One = __half;
    using Two = __half2;
    static __device__ One one(u16 bits) { return __ushort_as_half(bits); }
    static __device__ u16 bits(One value) { return __half_as_ushort(value); }
    static __device__ Two two(One low, One high) { return __halves2half2(low, high); }
    static __device__ One low(Two value) { return __low2half(value); }
};
struct Bfloat16 {
    using One = __nv_bfloat16;
    using Two = __nv_bfloat162;
    static __device__ One one(u16 bits) { return __ushort_as_bfloat16(bits); }
    static __device__ u16 bits(One value) { return __bfloat16_as_ushort(value); }
    static __device__ Two two(One low, One high) { return __halves2bfloat162(low, high); }
    static __device__ One low(Two value) { return __low2bfloat16(value); }
};

// out[operation, i]; pairs hold (a, b), so that the upper half of a mask is that of (b, a).
template <class Type>
__device__ void narrow_arithmetic(const u16* a, const u16* b, const u16* c, u16* out, u32* masks, int n) {
    const int i = at();
    if (i >= n) return;
    const typename Type::One one_a = Type::one(a[i]), one_b = Type::one(b[i]), one_c = Type::one(c[i]);
    const typename Type::Two ab = Type::two(one_a, one_b), ba = Type::two(one_b, one_a), cc = Type::two(one_c, one_c);
    const u16 results[] = {
        Type::bits(__hadd(one_a, one_b)),
        Type::bits(Type::low(__hadd2(ab, ba))),
        Type::bits(Type::low(__hmul2(ab, ba))),
        Type::bits(__hfma(one_a, one_b, one_c)),
        Type::bits(Type::low(__hfma2(ab, ba, cc))),
        Type::bits(Type::low(__hmax2(ab, ba))),
        Type::bits(Type::low(__hmax2_nan(ab, ba))),
        static_cast<u16>(__hgt(one_a, one_b)),
        static_cast<u16>(__hisnan(one_a)),
    };
    for (int r = 0; r < 9; ++r) out[r * n + i] = results[r];
    masks[i] = __hgt2_mask(ab, ba);
    masks[n + i] = __heq2_mask(ab, ba);
}

}  // namespace

extern "C" __global__ void half_arithmetic(const u16* a, const u16* b, const u16* c, u16* out, u32* masks, int n) {
    narrow_arithmetic<Half>(a, b, c, out, masks, n);
}

extern "C" __global__ void bfloat16_arithmetic(const u16* a, const u16* b, const u16* c, u16* out, u32* masks, int n) {
    narrow_arithmetic<Bfloat16>(a, b, c, out, masks, n);
}

extern "C" __global__ void narrow(const float* x, const double* wide, u16* half, u16* bfloat, float* single, int n) {
    const int i = at();
    if (i >= n) return;
    half[i] = __half_as_ushort(__float2half_rn(x[i]));
    half[n + i] = __half_as_ushort(__double2half(wide[i]));
    half[2 * n + i] = __half_as_ushort(__low2half(__floats2half2_rn(x[i], 0.0f)));
    bfloat[i] = __bfloat16_as_ushort(__float2bfloat16_rn(x[i]));
    bfloat[n + i] = __bfloat16_as_ushort(__double2bfloat16(wide[i]));
    bfloat[2 * n + i] = __bfloat16_as_ushort(__high2bfloat16(__floats2bfloat162_rn(0.0f, x[i])));
    single[i] = __double2float_rn(wide[i]);
}

extern "C" __global__ void widen(const u16* bits, float* half, float* bfloat, int n) {
    const int i = at();
    if (i >= n) return;
    half[i] = __half2float(__ushort_as_half(bits[i]));
    half[n + i] = __half22float2(__halves2half2(__ushort_as_half(0), __ushort_as_half(bits[i]))).y;
    bfloat[i] = __bfloat162float(__ushort_as_bfloat16(bits[i]));
    bfloat[n + i] = __bfloat1622float2(__halves2bfloat162(__ushort_as_bfloat16(bits[i]), __ushort_as_bfloat16(0))).x;
}

extern "C" __global__ void float_arithmetic(const float* a, const float* b, const float* c, float* out, int n) {
    const int i = at();
    if (i >= n) return;
    const float results[] = {
        __fadd_rn(a[i], b[i]), __fsub_rn(a[i], b[i]), __fmul_rn(a[i], b[i]), __fdiv_rn(a[i], b[i]),
        __fmaf_rn(a[i], b[i], c[i]), a[i] * b[i] + c[i], min(a[i], b[i]), max(a[i], b[i]),
    };
    for (int r = 0; r < 8; ++r) out[r * n + i] = results[r];
}

extern "C" __global__ void double_arithmetic(const double* a, const double* b, const double* c, double* out, int n) {
    const int i = at();
    if (i >= n) return;
    const double results[] = {
        __dadd_rn(a[i], b[i]), __dsub_rn(a[i], b[i]), __dmul_rn(a[i], b[i]), __ddiv_rn(a[i], b[i]),
        __fma_rn(a[i], b[i], c[i]), a[i] * b[i] + c[i], min(a[i], b[i]), max(a[i], b[i]),
    };
    for (int r = 0; r < 8; ++r) out[r * n + i] = results[r];
}

extern "C" __global__ void permute(const u32* x, const u32* y, const u32* selector, u32* out, int n) {
    const int i = at();
    if (i < n) out[i] = __byte_perm(x[i], y[i], selector[i]);
}

extern "C" __global__ void integers(const u32* x, const float* f, const double* d, u32* out, long long* wide, int n) {
    const int i = at();
    if (i >= n) return;
    const u32 results[] = {
        static_cast<u32>(__popc(x[i])), static_cast<u32>(__clz(static_cast<int>(x[i]))),
        static_cast<u32>(__ffs(static_cast<int>(x[i]))), __float_as_uint(f[i]),
        static_cast<u32>(__float_as_int(f[i])), __float_as_uint(__uint_as_float(x[i])),
        max(x[i], 7), min(static_cast<u32>(-1), x[i]),
    };
    for (int r = 0; r < 8; ++r) out[r * n + i] = results[r];
    wide[i] = __double_as_longlong(d[i]);
    wide[n + i] = min(wide[i], 5);
}

// out[kind, argument, thread] for the arguments 0 to 31.
extern "C" __global__ void shuffles(const u32* in, u32* out, int width) {
    const u32 mine = in[threadIdx.x];
    for (int argument = 0; argument < 32; ++argument) {
        u32* to = out + argument * blockDim.x + threadIdx.x;
        const int plane = 32 * blockDim.x;
        to[0 * plane] = __shfl_sync(0xffffffffu, mine, argument, width);
        to[1 * plane] = __shfl_up_sync(0xffffffffu, mine, argument, width);
        to[2 * plane] = __shfl_down_sync(0xffffffffu, mine, argument, width);
        to[3 * plane] = __shfl_xor_sync(0xffffffffu, mine, argument, width);
    }
}

extern "C" __global__ void shuffle_types(u32* half2, double* wide, long long* integer) {
    const int lane = threadIdx.x;
    const __half2 pair = __floats2half2_rn(static_cast<float>(lane), -1.0f);
    const __half2 other = __shfl_xor_sync(0xffffffffu, pair, 1);
    half2[lane] = *reinterpret_cast<const u32*>(&other);
    wide[lane] = __shfl_xor_sync(0xffffffffu, lane + 0.25, 1);
    integer[lane] = __shfl_xor_sync(0xffffffffu, lane + (1LL << 40), 1);
}

// Lanes of odd and of even number vote apart; the last warp may be partial.
extern "C" __global__ void votes(const int* p, u32* ballot, int* any, int* all, u32* active) {
    const u32 mask = threadIdx.x % 2 ? 0xaaaaaaaau : 0x55555555u;
    const int mine = p[threadIdx.x];
    active[threadIdx.x] = __activemask();
    if (threadIdx.x % 2) {
        ballot[threadIdx.x] = __ballot_sync(mask, mine);
    } else {
        ballot[threadIdx.x] = __ballot_sync(mask, mine);
    }
    any[threadIdx.x] = __any_sync(mask, mine);
    all[threadIdx.x] = __all_sync(mask, mine);
    __syncwarp();
}

extern "C" __global__ void block_votes(const int* p, int* count, int* any, int* all) {
    const int i = threadIdx.x, n = blockDim.x;
    for (int round = 0; round < 3; ++round) {
        count[round * n + i] = __syncthreads_count(p[round * n + i]);
        any[round * n + i] = __syncthreads_or(p[round * n + i]);
        all[round * n + i] = __syncthreads_and(p[round * n + i]);
    }
}

extern "C" __global__ void atomics(u32* counters, float* sum, int* extremes, unsigned long long* wide) {
    atomicAdd(&counters[0], 1);
    atomicSub(&counters[1], 1);
    atomicOr(&counters[2], 1u << (threadIdx.x % 32));
    atomicXor(&counters[3], threadIdx.x);
    if (atomicCAS(&counters[4], 0u, 1u) == 0u) atomicExch(&counters[5], 77u);
    atomicAdd(sum, 0.5f);
    atomicMax(&extremes[0], static_cast<int>(threadIdx.x));
    atomicMin(&extremes[1], -static_cast<int>(threadIdx.x));
    atomicAdd(wide, 1ull << 33);
}

extern "C" __global__ void positions(u32* out) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = (blockIdx.x << 20) | (threadIdx.x << 10) | (gridDim.x << 5) | (blockDim.x & 31);
}
