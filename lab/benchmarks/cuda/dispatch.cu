// dispatch_cuda_v1: the plain CUDA C++ counterpart of dispatch.ptx: same data and flags, no bulk copies.
//
// A warp takes one (destination, place) item at a time, in an order that spreads over destinations, and moves
// the row with 16-byte loads and stores. Flags: __threadfence_system before an atomicAdd_system releases, a
// volatile poll followed by __threadfence_system acquires. Waits end after timeout_cycles (clock64).

typedef unsigned long long u64;
typedef unsigned int u32;

__device__ void copy_row(uint4* to, const uint4* from, u32 vectors, u32 lane) {
    constexpr int UNROLL = 8;
    for (u32 first = lane; first < vectors; first += 32 * UNROLL) {
        uint4 value[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i)
            if (first + 32 * i < vectors) value[i] = __ldg(from + first + 32 * i);
#pragma unroll
        for (int i = 0; i < UNROLL; ++i)
            if (first + 32 * i < vectors) to[first + 32 * i] = value[i];
    }
}

// tables: [3][ranks]: receive rows, receive side records, arrival counters; status: see signal.ptx.
extern "C" __global__ void __launch_bounds__(1024, 1)
dispatch_cuda_v1(const uint4* x, const uint4* side, const int* lists, const int* counts, const int* bases,
                 const u64* tables, u32 tokens, u32 ranks, u32 rank, u32 row_bytes, u32 side_bytes,
                 u32 expected, u64 timeout_cycles, u32* status) {
    if (*(volatile u32*)status != 0) return;
    const u32 lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const u32 row = row_bytes / 16, record = side_bytes / 16;
    int most = 0;
    for (u32 r = 0; r < ranks; ++r) most = max(most, counts[r]);
    const u32 step = gridDim.x * warps;
    for (u32 g = threadIdx.x / 32 * gridDim.x + blockIdx.x; g < most * ranks; g += step) {
        const u32 place = g / ranks, to = (rank + g + place) % ranks;
        if (place >= counts[to]) continue;
        const u64 token = lists[(u64)to * tokens + place], at = bases[to] + place;
        copy_row((uint4*)tables[to] + at * row, x + token * row, row, lane);
        copy_row((uint4*)tables[ranks + to] + at * record, side + token * record, record, lane);
    }
    __syncthreads();
    const u32 peer = threadIdx.x;
    if (peer >= ranks) return;
    __threadfence_system();
    atomicAdd_system((u32*)tables[2 * ranks + peer] + rank, 1u);
    if (blockIdx.x != 0) return;
    volatile u32* arrived = (volatile u32*)tables[2 * ranks + rank] + peer;
    const long long start = clock64();
    while ((int)(*arrived - expected) < 0) {
        if ((u64)(clock64() - start) < timeout_cycles) continue;
        if (atomicCAS(status, 0u, 0x400u) == 0) {
            status[1] = rank, status[2] = peer, status[3] = expected, status[4] = *arrived;
        }
        return;
    }
    __threadfence_system();
}
