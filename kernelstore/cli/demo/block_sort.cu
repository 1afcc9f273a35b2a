// Each block sorts its own tile of keys.

// CUB 2.8 (CUDA 12.9) uses what CUB 2.8 deprecates; without this it warns of itself.
#define CCCL_IGNORE_DEPRECATED_API
#include <cub/block/block_load.cuh>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_store.cuh>

template <typename Key, int kThreads, int kItems>
__global__ void __launch_bounds__(kThreads) block_sort(const Key *in, Key *out) {
    using Load = cub::BlockLoad<Key, kThreads, kItems, cub::BLOCK_LOAD_TRANSPOSE>;
    using Sort = cub::BlockRadixSort<Key, kThreads, kItems>;
    using Store = cub::BlockStore<Key, kThreads, kItems, cub::BLOCK_STORE_TRANSPOSE>;
    __shared__ union {
        typename Load::TempStorage load;
        typename Sort::TempStorage sort;
        typename Store::TempStorage store;
    } shared;

    const int tile = blockIdx.x * kThreads * kItems;
    Key keys[kItems];
    Load(shared.load).Load(in + tile, keys);
    __syncthreads();
    Sort(shared.sort).Sort(keys);
    __syncthreads();
    Store(shared.store).Store(out + tile, keys);
}
