// Each block replaces its own tile by the running sum of it.

// CUB 2.8 (CUDA 12.9) uses what CUB 2.8 deprecates; without this it warns of itself.
#define CCCL_IGNORE_DEPRECATED_API
#include <cub/block/block_scan.cuh>

template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads) block_scan(const T *in, T *out, int n) {
    using Scan = cub::BlockScan<T, kThreads>;
    __shared__ typename Scan::TempStorage shared;

    const int i = blockIdx.x * kThreads + threadIdx.x;
    T running;
    Scan(shared).InclusiveSum(i < n ? in[i] : T{}, running);
    if (i < n) {
        out[i] = running;
    }
}
