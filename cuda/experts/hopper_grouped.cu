// Products of experts with many rows, on Hopper by wgmma: what `grouped.cu` computes, with its operands and its bits.
//
// Weights are the left operand, in registers: elements, or made such of what lies packed in shared memory, as in `grouped.cu`.
// A warp has two panels of 8 rows of W, of gate and of up or two that follow each other, which are the rows lane / 4 and
// lane / 4 + 8 of its part of a wgmma: so a lane has gate and up of the same numbers. The right operand is a tile of N
// positions, whose rows lie anywhere: they are copied one by one to where the 128-byte swizzle wants them.
//
// A block has N positions and, by its GROUPS warpgroups, 64 GROUPS rows of W. It goes through K by DEPTH, STAGES copies ahead;
// what K lacks at its end is zeros. Elements of 32 inputs are made while the ones before them are multiplied. grid (outputs,
// tiles that there may be): blocks without a tile end. Bytes: W once for each tile of positions, those of an expert one after
// the other, so that L2 has it; x once for each block.
#include "experts/gathered_rows.cuh"
#include "experts/grouped.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <int N>
struct Tile {
    static constexpr int BLOCKS = N >= 128 ? 1 : 2, ROOM = (BLOCKS == 1 ? 222 : 110) << 10;  // of a multiprocessor; of each
    static constexpr int BOX = N * 128;  // bytes of 64 inputs of all positions
    static constexpr int X_BYTES = Weights::DEPTH / 64 * BOX;
    static constexpr int bytes(int groups) { return (X_BYTES + 8 * groups * Weights::BYTES + 1023) / 1024 * 1024; }
    static constexpr int GROUPS = N < 128 ? 2 : 2 * bytes(4) <= ROOM ? 4 : 3;  // warpgroups
    static constexpr int WARPS = 4 * GROUPS, THREADS = 128 * GROUPS;
    static constexpr int BYTES = bytes(GROUPS), FIT = ROOM / BYTES;  // of a stage
    static constexpr int STAGES = FIT < 2 ? 2 : FIT > 4 ? 4 : FIT;
};

// Where 8 elements from `k` on of a position lie in a stage.
template <int N>
static __device__ __forceinline__ uint32_t place_of(int position, int k) {
    return k / 64 * Tile<N>::BOX + place_in_box(position, k % 64 / 8);
}

// A stage's rows of x.
template <int N>
static __device__ __forceinline__ void fetch_rows(uint32_t stage, const Operands& given, const int* source_rows, int positions,
                                                  int step) {
    constexpr int PIECES = Weights::DEPTH / 8;
    for (int piece = threadIdx.x; piece < N * PIECES; piece += Tile<N>::THREADS) {
        const int position = piece / PIECES, within = piece % PIECES * 8, k = step * Weights::DEPTH + within;
        const bool inside = position < positions && k < given.inputs;
        const Input* source = given.x + (inside ? static_cast<int64_t>(source_rows[position]) * given.inputs + k : 0);
        copy_async(stage + place_of<N>(position, within), source, inside);
    }
}

// acc[4 j + 2 p + e]: row lane / 4 of panel p, position 8 j + 2 (lane % 4) + e.
template <int N>
static __device__ __forceinline__ void multiply(float (&acc)[N / 2], const Operands& given, const int4& tile,
                                                const int64_t (&rows)[2], int* source_rows) {
    using Memory = Tile<N>;
    constexpr int DEPTH = Weights::DEPTH, STAGES = Memory::STAGES;
    extern __shared__ __align__(16) unsigned char dynamic[];
    const uint32_t base = (shared_address(dynamic) + 1023) & ~1023u;
    const unsigned char* const aligned = dynamic + (base - shared_address(dynamic));
    const int warp = threadIdx.x / 32, steps = (given.inputs + DEPTH - 1) / DEPTH;
    for (int i = threadIdx.x; i < N; i += Memory::THREADS) {
        const int position = tile.y + min(i, tile.z - 1);
        source_rows[i] = given.sources == nullptr ? position : given.sources[position];
    }
    __syncthreads();
    const auto fetch = [&](int step) {
        if (step < steps) {
            const uint32_t stage = base + step % STAGES * Memory::BYTES;
            const uint32_t own = stage + Memory::X_BYTES + warp * 2 * Weights::BYTES;
#pragma unroll
            for (int p = 0; p < 2; ++p)
                Weights::fetch(own + p * Weights::BYTES, given.weights, rows[p], given.inputs, step);
            fetch_rows<N>(stage, given, source_rows, tile.z, step);
        }
        commit_copies();
    };
#pragma unroll 1
    for (int step = 0; step < STAGES - 1; ++step) fetch(step);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        wait_for_copies<STAGES - 2>();
        publish_to_wgmma();
        __syncthreads();  // all that was copied is there, and all have done with the stage that is filled next
        fetch(step + STAGES - 1);
        const int stage = step % STAGES * Memory::BYTES;
        const unsigned char* panels = aligned + stage + Memory::X_BYTES + warp * 2 * Weights::BYTES;
        const uint64_t start = tile_descriptor(base + stage);
        uint32_t a[2][2][4];  // of two groups of 32 inputs, two products each
        typename Weights::Handed handed[2];
#pragma unroll
        for (int group = 0; group < DEPTH / 32; ++group) {
            if (group % 4 == 0)
                handed[0] = Weights::hand(panels, group), handed[1] = Weights::hand(panels + Weights::BYTES, group);
            const Element8 first = Weights::group(panels, group, handed[0]);
            const Element8 second = Weights::group(panels + Weights::BYTES, group, handed[1]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                a[group % 2][half][0] = first.word[2 * half], a[group % 2][half][1] = second.word[2 * half];
                a[group % 2][half][2] = first.word[2 * half + 1], a[group % 2][half][3] = second.word[2 * half + 1];
            }
            wgmma_begin();
#pragma unroll
            for (int half = 0; half < 2; ++half)
                wgmma(acc, a[group % 2][half],
                      further(start, group / 2 * (Memory::BOX / 16) + (group % 2 * 2 + half) * 2), step + group + half > 0);
            wgmma_commit();
            if (group < DEPTH / 32 - 1)
                wgmma_wait<1>();
            else
                wgmma_wait<0>();
        }
    }
    wgmma_keep(acc);
}

template <Result RESULT, int N>
static __device__ __forceinline__ void product(const Operands& given, const int4* tiles, const int* total,
                                               typename Stored<RESULT>::type* y) {
    __shared__ int source_rows[N];
    constexpr bool TWO = RESULT == Result::TWO;
    if (blockIdx.y >= *total) return;
    const int4 tile = tiles[blockIdx.y];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, outputs = given.outputs;
    const int64_t first = static_cast<int64_t>(tile.x) * given.stride;
    const int block = (blockIdx.x * Tile<N>::WARPS + warp) * PANEL * (TWO ? 1 : 2);  // this warp's first output
    const int begins[2] = {block, TWO ? block : block + PANEL};
    int64_t rows[2];
#pragma unroll
    for (int p = 0; p < 2; ++p) rows[p] = first + min(begins[p], outputs - PANEL) + (TWO && p ? given.side : 0);
    float acc[N / 2];
    multiply<N>(acc, given, tile, rows, source_rows);
    const float* scales[2] = {given.first_scales, TWO ? given.second_scales : given.first_scales};
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        float values[2][2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int within = 8 * j + 2 * t + e, source = source_rows[within];
#pragma unroll
            for (int p = 0; p < 2; ++p)
                values[p][e] = finished(acc[4 * j + 2 * p + e], given, source, rows[p] + g, scales[p], tile.x);
        }
        if constexpr (RESULT == Result::FLOATS) {
#pragma unroll
            for (int e = 0; e < 2; ++e)
#pragma unroll
                for (int p = 0; p < 2; ++p)
                    if (const int within = 8 * j + 2 * t + e; within < tile.z && begins[p] < outputs)
                        y[static_cast<int64_t>(tile.y + within) * outputs + begins[p] + g] = values[p][e];
        } else {
            const int within = 8 * j + g;  // of what this lane writes: two neighbours of a position
            const int64_t place = static_cast<int64_t>(tile.y + within) * outputs;
#pragma unroll
            for (int p = 0; p < (TWO ? 1 : 2); ++p) {
                float ups[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int own = 8 * j + 2 * t + e;
                    ups[e] = TWO ? values[1][e] : 1.0f;
                    if (!TWO && given.other != nullptr && own < tile.z && begins[p] < outputs)
                        ups[e] = given.other[static_cast<int64_t>(tile.y + own) * outputs + begins[p] + g];
                }
                const uint32_t word = transposed(pack(activated(given.activation, values[p][0], ups[0]),
                                                      activated(given.activation, values[p][1], ups[1])));
                if (within < tile.z && begins[p] < outputs)
                    *reinterpret_cast<uint32_t*>(y + place + begins[p] + 2 * t) = word;
            }
        }
    }
}

#define PRODUCT(NAME, RESULT, N)                                                                                 \
    EXPERTS_KERNEL(hopper_##NAME##_##N, RESULT, __launch_bounds__(Tile<N>::THREADS, Tile<N>::BLOCKS), (product<RESULT, N>))
#define PRODUCTS(NAME, RESULT) PRODUCT(NAME, RESULT, 32) PRODUCT(NAME, RESULT, 64) PRODUCT(NAME, RESULT, 128)

PRODUCTS(floats, Result::FLOATS)
PRODUCTS(one, Result::ONE)
PRODUCTS(two, Result::TWO)

#endif
