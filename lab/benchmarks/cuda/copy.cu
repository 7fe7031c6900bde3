// copy_cuda_v1: the plain CUDA C++ counterpart of copy_ldst.ptx, same parameters, launch shape and meaning.
//
// What it leaves to the compiler: cache hints (no L1::no_allocate, no 256-byte L2 prefetch). Loads of a tile are
// unrolled so that eight 16-byte loads a thread are in flight, as in the PTX.

struct Pair {
    const uint4* source;
    uint4* target;
};

extern "C" __global__ void __launch_bounds__(1024, 1)
copy_cuda_v1(const Pair* pairs, unsigned int n_pairs, unsigned long long n_bytes) {
    constexpr int UNROLL = 8;
    const unsigned long long vectors = n_bytes / 16, tile = UNROLL * blockDim.x;
    const unsigned long long tiles = (vectors + tile - 1) / tile;
    for (unsigned long long g = blockIdx.x; g < tiles * n_pairs; g += gridDim.x) {
        const Pair pair = pairs[g % n_pairs];
        const unsigned long long first = g / n_pairs * tile + threadIdx.x;
        const uint4* from = pair.source + first;
        uint4* to = pair.target + first;
        if (first - threadIdx.x + tile > vectors) {  // the last tile of a pair
            for (unsigned long long at = first; at < vectors; at += blockDim.x, from += blockDim.x, to += blockDim.x)
                *to = __ldg(from);
            continue;
        }
        uint4 value[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) value[i] = __ldg(from + i * blockDim.x);
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) to[i * blockDim.x] = value[i];
    }
}
