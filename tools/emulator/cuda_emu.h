// What a CUDA kernel sees when g++ compiles it for the CPU.
//
// build.py puts this header before the text of a kernel; executor.cpp runs the threads. Vector types, half and
// bfloat16 and their arithmetic come from NVIDIA's own headers. This one adds what those leave out for a host
// compiler: thread indices, barriers, warp intrinsics, cache-hinted accesses, atomics, bit casts and explicitly
// rounded arithmetic.
//
// All threads of a launch are fibers on one OS thread, run in a fixed order from barrier to barrier. To
// ThreadSanitizer each is a thread of its own, ordered with others by barriers alone.
//
// Not emulated: inline PTX, cp.async, cooperative groups, tensor cores, textures, template kernels, weak memory
// order, warps that run in lockstep.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_functions.h>
#include <vector_types.h>

// NVIDIA's headers make these unknown attributes for a host compiler. Declarations with __shared__ are rewritten
// by unit.py; one that it does not know stays a compile error.
#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __launch_bounds__(...)  // EMU_KERNEL passes it on: the executor checks it
#define __grid_constant__

// ---------------------------------------------------------------- executor.cpp, as kernels see it
namespace emu {

struct Position {  // of the thread that runs
    uint3 thread, block;
    dim3 block_size, grid_size;
    int lane;
};
extern const Position* here;

[[noreturn]] void fail(const char* what);  // ends the program with a message that names the thread

void* dynamic_shared();                    // the block's own, of exactly the size asked for
int add_static_shared(size_t bytes);       // before main: reserves a variable in every block ...
void* static_shared(int variable);         // ... and this is the one of the block that runs

void block_barrier(int line);
int block_count(int predicate, int line);  // a barrier that counts the threads whose predicate holds
void warp_barrier(unsigned mask);
// Posts a value, waits for all lanes of the mask and copies what they posted; orders nothing else, as on the
// device. Returns the lanes that exist.
unsigned warp_exchange(unsigned mask, uint64_t value, uint64_t (&values)[32]);
unsigned warp_active();

struct Argument { size_t bytes; bool pointer; };
struct Kernel {
    const char* name;
    void (*call)(void* const* values);     // one pointer to each argument's value
    const Argument* arguments;
    int argument_count;
    int (*max_threads)();                  // the first of __launch_bounds__; 0: none given
};
bool add_kernel(const Kernel& kernel);
int add_parameter(int* variable);          // a macro that became a variable; in the order of build()'s parameters

template <class T, int DECLARATION> struct StaticShared {
    static inline const int variable = add_static_shared(sizeof(T));
};
template <class T, int DECLARATION> T& static_shared_variable() {
    return *static_cast<T*>(static_shared(StaticShared<T, DECLARATION>::variable));
}

template <auto FUNCTION> struct Entry;
template <class... A, void (*FUNCTION)(A...)> struct Entry<FUNCTION> {
    static constexpr Argument arguments[sizeof...(A) + 1] = {{sizeof(A), std::is_pointer_v<A>}..., {0, false}};
    static constexpr int argument_count = sizeof...(A);
    static void call(void* const* values) { call(values, std::index_sequence_for<A...>{}); }
    template <size_t... I> static void call(void* const* values, std::index_sequence<I...>) {
        FUNCTION(*static_cast<A*>(values[I])...);
    }
};

}  // namespace emu

#define EMU_PARAMETER(name)               \
    static int emu_parameter_##name = 0;  \
    static const int emu_added_##name = emu::add_parameter(&emu_parameter_##name);
#define EMU_KERNEL(name, bound)                                                                              \
    static const bool emu_kernel_##name = emu::add_kernel({#name, &emu::Entry<&name>::call,                  \
                                                           emu::Entry<&name>::arguments,                     \
                                                           emu::Entry<&name>::argument_count,                \
                                                           [] { return static_cast<int>(bound); }});

// ---------------------------------------------------------------- threads and barriers
#define threadIdx (emu::here->thread)
#define blockIdx (emu::here->block)
#define blockDim (emu::here->block_size)
#define gridDim (emu::here->grid_size)
inline constexpr int warpSize = 32;

inline void __syncthreads(int line = __builtin_LINE()) { emu::block_barrier(line); }
inline int __syncthreads_count(int p, int line = __builtin_LINE()) { return emu::block_count(p != 0, line); }
inline int __syncthreads_or(int p, int line = __builtin_LINE()) { return emu::block_count(p != 0, line) > 0; }
inline int __syncthreads_and(int p, int line = __builtin_LINE()) { return emu::block_count(p == 0, line) == 0; }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emu::warp_barrier(mask); }
inline unsigned __activemask() { return emu::warp_active(); }
[[noreturn]] inline void __trap() { emu::fail("__trap"); }
#define __builtin_assume(condition) ((condition) ? void() : emu::fail("__builtin_assume(" #condition ") does not hold"))

// Fences order nothing here: fibers change only at barriers, and TSan does not model stand-alone fences.
inline void __threadfence() {}
inline void __threadfence_block() {}

// ---------------------------------------------------------------- warp intrinsics
namespace emu {
template <class T> T shuffle(unsigned mask, T value, int source) {
    static_assert(std::is_trivially_destructible_v<T> && sizeof(T) <= 8);
    uint64_t raw = 0, values[32];
    std::memcpy(&raw, &value, sizeof value);
    if (!(warp_exchange(mask, raw, values) >> source & 1)) fail("a shuffle reads a lane outside the mask");
    std::memcpy(&value, &values[source], sizeof value);
    return value;
}
}  // namespace emu

// A source outside the segment of `width` lanes gives a lane its own value, as in CUDA.
template <class T> T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    return emu::shuffle(mask, value, (emu::here->lane & ~(width - 1)) + (source & (width - 1)));
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    const int lane = emu::here->lane, source = lane ^ bits, end = (lane & ~(width - 1)) + width;
    return emu::shuffle(mask, value, source < end ? source : lane);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int lane = emu::here->lane, source = lane + static_cast<int>(delta), end = (lane & ~(width - 1)) + width;
    return emu::shuffle(mask, value, source < end ? source : lane);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int lane = emu::here->lane, source = lane - static_cast<int>(delta), start = lane & ~(width - 1);
    return emu::shuffle(mask, value, source >= start ? source : lane);
}
inline unsigned __ballot_sync(unsigned mask, int p) {
    uint64_t values[32];
    const unsigned lanes = emu::warp_exchange(mask, p != 0, values);
    unsigned result = 0;
    for (int i = 0; i < 32; ++i)
        if (lanes >> i & 1) result |= static_cast<unsigned>(values[i]) << i;
    return result;
}
inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, !p) == 0; }

// ---------------------------------------------------------------- memory
// Cache hints mean nothing here.
#define EMU_LOAD(name) template <class T> T name(const T* p) { return *p; }
#define EMU_STORE(name) template <class T> void name(T* p, std::type_identity_t<T> value) { *p = value; }
EMU_LOAD(__ldg) EMU_LOAD(__ldcs) EMU_LOAD(__ldcg) EMU_LOAD(__ldca) EMU_LOAD(__ldlu) EMU_LOAD(__ldcv)
EMU_STORE(__stcs) EMU_STORE(__stcg) EMU_STORE(__stwb) EMU_STORE(__stwt)
#undef EMU_LOAD
#undef EMU_STORE

// Atomics, relaxed as in CUDA.
namespace emu {
template <class T, class Change> T atomic(T* p, Change change) {
    using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;
    static_assert(sizeof(T) == sizeof(Bits));
    Bits* bits = reinterpret_cast<Bits*>(p);
    Bits seen = __atomic_load_n(bits, __ATOMIC_RELAXED);
    for (;;) {
        T old;
        std::memcpy(&old, &seen, sizeof old);
        const T changed = change(old);
        Bits wanted;
        std::memcpy(&wanted, &changed, sizeof wanted);
        if (__atomic_compare_exchange_n(bits, &seen, wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return old;
    }
}
}  // namespace emu
#define EMU_ATOMIC(name, changed)                                   \
    template <class T> T name(T* p, std::type_identity_t<T> value) { \
        return emu::atomic(p, [value]([[maybe_unused]] T old) -> T { return changed; }); \
    }
EMU_ATOMIC(atomicAdd, old + value) EMU_ATOMIC(atomicSub, old - value) EMU_ATOMIC(atomicExch, value)
EMU_ATOMIC(atomicMax, old < value ? value : old) EMU_ATOMIC(atomicMin, value < old ? value : old)
EMU_ATOMIC(atomicAnd, old & value) EMU_ATOMIC(atomicOr, old | value) EMU_ATOMIC(atomicXor, old ^ value)
#undef EMU_ATOMIC
template <class T> T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
    return emu::atomic(p, [=](T old) -> T { return old == expected ? value : old; });
}

// ---------------------------------------------------------------- bits and integers
inline int __float_as_int(float f) { return std::bit_cast<int>(f); }
inline unsigned __float_as_uint(float f) { return std::bit_cast<unsigned>(f); }
inline float __int_as_float(int i) { return std::bit_cast<float>(i); }
inline float __uint_as_float(unsigned i) { return std::bit_cast<float>(i); }
inline long long __double_as_longlong(double d) { return std::bit_cast<long long>(d); }
inline double __longlong_as_double(long long i) { return std::bit_cast<double>(i); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t(a) * b >> 32); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((uint64_t(high) << 32 | low) >> (shift & 31));
}
// Byte i of the result is the byte of {y:x} that nibble i selects; bit 3 of a nibble replicates that byte's sign.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t bytes = uint64_t(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned nibble = selector >> (4 * i);
        unsigned byte = static_cast<unsigned>(bytes >> (8 * (nibble & 7))) & 0xffu;
        if (nibble & 8) byte = byte & 0x80u ? 0xffu : 0u;
        result |= byte << (8 * i);
    }
    return result;
}

// CUDA's min and max take mixed types; of a number and a NaN they give the number.
namespace emu {
template <class A, class B> concept Numbers = std::is_arithmetic_v<A> && std::is_arithmetic_v<B>;
}
template <class A, class B> requires emu::Numbers<A, B> std::common_type_t<A, B> min(A a, B b) {
    using C = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<C>) return std::fmin(static_cast<C>(a), static_cast<C>(b));
    else return static_cast<C>(b) < static_cast<C>(a) ? static_cast<C>(b) : static_cast<C>(a);
}
template <class A, class B> requires emu::Numbers<A, B> std::common_type_t<A, B> max(A a, B b) {
    using C = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<C>) return std::fmax(static_cast<C>(a), static_cast<C>(b));
    else return static_cast<C>(a) < static_cast<C>(b) ? static_cast<C>(b) : static_cast<C>(a);
}

// ---------------------------------------------------------------- arithmetic, rounded to nearest even
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __drcp_rn(double a) { return 1.0 / a; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __double2float_rn(double a) { return static_cast<float>(a); }
inline float __int2float_rn(int a) { return static_cast<float>(a); }
inline float __uint2float_rn(unsigned a) { return static_cast<float>(a); }
inline double __int2double_rn(int a) { return a; }
inline double __uint2double_rn(unsigned a) { return a; }

// Fused multiply-add of half and bfloat16, which NVIDIA's headers keep for the device. The product is exact in
// double; the sum is rounded to odd there, so that the rounding to the narrow type is the only one that counts.
namespace emu {
inline double fma_to_odd(double a, double b, double c) {
    const double product = a * b, sum = product + c;
    if (!std::isfinite(sum)) return sum;
    const double z = sum - product, error = (product - (sum - z)) + (c - z);  // sum + error is exact
    if (error == 0 || (std::bit_cast<uint64_t>(sum) & 1)) return sum;
    return std::nextafter(sum, error > 0 ? HUGE_VAL : -HUGE_VAL);
}
}  // namespace emu
inline __half __hfma(__half a, __half b, __half c) {
    return __double2half(emu::fma_to_odd(__half2float(a), __half2float(b), __half2float(c)));
}
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
    return __double2bfloat16(emu::fma_to_odd(__bfloat162float(a), __bfloat162float(b), __bfloat162float(c)));
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return __halves2half2(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
    return __halves2bfloat162(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}
