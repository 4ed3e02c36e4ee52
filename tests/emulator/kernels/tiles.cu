// A clean kernel with the habits of the generated ones: persistent blocks, a tile in dynamic shared memory,
// static shared memory, vectors, local arrays whose size is a macro, helpers in an unnamed namespace.
//
//   y[row, n] = sum over k of x[row, indices[k, n]], where an index of NIN adds nothing
//   tiles[0] += tiles done
#include <cuda_fp16.h>

#ifndef K
#define K 3
#define NIN 16
#define NOUT 8
#define THREADS 64
#endif

namespace {

struct alignas(16) Piece { float value[4]; };
struct __align__(8) Pair { float first, second; };

template <class T> __device__ __forceinline__ T round_up(T value, T unit) { return (value + unit - 1) / unit * unit; }

template <int N> struct Adder {
    float total[N];
    __device__ void add(int i, float value) { total[i] = __fadd_rn(total[i], value); }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 2)
sum_tiles(const float* __restrict__ x, const int* __restrict__ indices, float* __restrict__ y,
          unsigned* __restrict__ tiles, long long rows)
{
    extern __shared__ __align__(16) unsigned char shared[];  // round_up(NIN, 4) floats
    __shared__ int done;
    __shared__ Pair pairs[2][2];
    const int slots = K, nodes = NIN;
    float* tile = reinterpret_cast<float*>(shared);

    if (threadIdx.x == 0) done = 0;
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        if (nodes % 4 == 0) {
            const Piece* pieces = reinterpret_cast<const Piece*>(x + row * nodes);
            for (int i = threadIdx.x; i < nodes / 4; i += THREADS) reinterpret_cast<Piece*>(tile)[i] = pieces[i];
        } else {
            for (int i = threadIdx.x; i < nodes; i += THREADS) tile[i] = __ldg(x + row * nodes + i);
        }
        __syncthreads();
        for (int n = threadIdx.x; n < NOUT; n += THREADS) {
            int column[slots];
            for (int k = 0; k < slots; ++k) column[k] = indices[k * NOUT + n];
            Adder<2> adder{{0.0f, 1.0f}};
            for (int k = 0; k < slots; ++k)
                if (column[k] < nodes) adder.add(0, tile[column[k]]);
            __stcs(y + row * NOUT + n, adder.total[0]);
        }
        if (threadIdx.x == 0) {
            ++done;
            pairs[1][1] = Pair{1.0f, 2.0f};
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) atomicAdd(tiles, static_cast<unsigned>(done));
}
