// Each block sums its own tile.
#include <cub/block/block_reduce.cuh>

template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads) block_reduce(const T *in, T *sums, int n) {
    using Reduce = cub::BlockReduce<T, kThreads>;
    __shared__ typename Reduce::TempStorage shared;

    const int i = blockIdx.x * kThreads + threadIdx.x;
    const T sum = Reduce(shared).Sum(i < n ? in[i] : T{});
    if (threadIdx.x == 0) {
        sums[blockIdx.x] = sum;
    }
}
