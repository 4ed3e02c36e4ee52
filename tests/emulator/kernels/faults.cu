// One small kernel for each fault that the emulator must find. The faulty line says so: tests look for its number.

namespace {
struct __align__(16) Quad { float value[4]; };
}  // namespace

extern "C" __global__ void reads_past_the_end(const float* x, float* y, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        y[i] = x[i + 1];  // fault
    }
}

extern "C" __global__ void reads_before_the_start(const float* x, float* y, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        y[i] = x[i - 1];  // fault
    }
}

extern "C" __global__ void writes_past_the_end(const float* x, float* y, int n) {
    if (threadIdx.x == 0) {
        y[n] = x[0];  // fault
    }
}

extern "C" __global__ void leaves_dynamic_shared(const float* x, float* y, int n) {
    extern __shared__ __align__(16) unsigned char shared[];
    float* tile = reinterpret_cast<float*>(shared);
    for (int i = threadIdx.x; i <= n; i += blockDim.x) {
        tile[i] = i < n ? x[i] : 0.0f;  // fault
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = tile[i];
}

extern "C" __global__ void leaves_static_shared(const float* x, float* y, int n) {
    __shared__ float tile[32];
    tile[threadIdx.x] = x[threadIdx.x % n];  // fault
    __syncthreads();
    y[threadIdx.x % n] = tile[0];
}

extern "C" __global__ void leaves_a_local_array(const float* x, float* y, int n) {
    float copy[n];
    for (int i = 0; i < n; ++i) copy[i] = x[i];
    y[threadIdx.x % n] = copy[n + threadIdx.x];  // fault
}

extern "C" __global__ void misaligned(const float* x, float* y, int n) {
    const Quad* quads = reinterpret_cast<const Quad*>(x);
    for (int i = threadIdx.x; i < n / 4; i += blockDim.x) {
        y[i] = quads[i].value[0];  // fault
    }
}

extern "C" __global__ void misaligned_load(const float* x, float* y, int n) {
    for (int i = threadIdx.x; i < n / 4; i += blockDim.x) {
        const uint4 bits = __ldcs(reinterpret_cast<const uint4*>(x) + i);  // fault
        y[i] = __uint_as_float(bits.x);
    }
}

extern "C" __global__ void forgets_a_barrier(const float* x, float* y, int n) {
    extern __shared__ float tile[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) tile[i] = x[i];
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        y[i] = tile[n - 1 - i];  // fault
    }
}

// A shuffle makes lanes meet, but does not order what they did to memory.
extern "C" __global__ void forgets_a_warp_barrier(const float* x, float* y, int n) {
    extern __shared__ float tile[];
    tile[threadIdx.x] = x[threadIdx.x];
    const int other = __shfl_xor_sync(0xffffffffu, static_cast<int>(threadIdx.x), 1);
    y[threadIdx.x % n] = tile[other];  // fault
}

extern "C" __global__ void has_a_warp_barrier(const float* x, float* y, int n) {
    extern __shared__ float tile[];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncwarp();
    y[threadIdx.x % n] = tile[threadIdx.x ^ 1];
}

extern "C" __global__ void blocks_write_the_same(const float* x, float* y, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        y[i] = x[i];  // fault
    }
}

extern "C" __global__ void barrier_in_a_branch(const float* x, float* y, int n) {
    if (threadIdx.x < 32) {
        __syncthreads();  // fault
    }
    y[threadIdx.x % n] = x[threadIdx.x % n];
}

extern "C" __global__ void different_barriers(const float* x, float* y, int n) {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();  // fault
    }
    y[threadIdx.x % n] = x[threadIdx.x % n];
}

extern "C" __global__ void half_a_warp_shuffles(const float* x, float* y, int n) {
    float value = x[threadIdx.x % n];
    if (threadIdx.x % 32 < 16) value = __shfl_xor_sync(0xffffffffu, value, 1);
    __syncthreads();
    y[threadIdx.x % n] = value;
}

extern "C" __global__ void shuffles_from_outside_the_mask(const float* x, float* y, int n) {
    float value = x[threadIdx.x % n];
    if (threadIdx.x % 32 < 16) value = __shfl_sync(0x0000ffffu, value, 20);
    y[threadIdx.x % n] = value;
}

extern "C" __global__ void reads_unwritten_shared(const float* x, float* y, int n) {
    extern __shared__ float tile[];
    __shared__ float one;
    if (threadIdx.x != 0) tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = tile[threadIdx.x];
    if (threadIdx.x == 0) y[n] = one;
}

extern "C" __global__ void writes_its_input(float* x, float* y, int n) {
    if (threadIdx.x == 0) x[n - 1] = y[0];
}

extern "C" __global__ void crashes(const float* x, float* y, int n) {
    float* nowhere = reinterpret_cast<float*>(static_cast<unsigned long long>(n));
    *nowhere = x[0];
}

extern "C" __global__ void never_ends(const float* x, volatile float* y, int n) {
    while (y[0] == x[0]) y[n - 1] = x[0];
}

extern "C" __global__ void __launch_bounds__(32) too_many_threads(const float* x, float* y, int n) {
    y[threadIdx.x % n] = x[threadIdx.x % n];
}

extern "C" __global__ void assumes_wrongly(const float* x, float* y, int n) {
    __builtin_assume(n < 0);
    y[0] = x[0];
}
