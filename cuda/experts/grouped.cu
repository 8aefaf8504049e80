// Products of experts with the rows that are sent to them, on every GPU from sm_80 on, by mma.sync.
//
//   x        (rows, K) elements; with -DFP8 E4M3, with `x_scales` (rows,) float
//   sources  (positions,) int: the row of x at each position (`route.cu`); null: row and position are the same
//   tiles    {expert, first position, positions, -}, `total` of them
//   W        rows of all experts, `stride` from one expert to the next: elements, with -DFP8 E4M3 with `w_scales` (rows,), with
//            -DFORMAT packed (`common/packed.cuh`). Up is `side` rows further on than gate
//   y        (positions, outputs)
//
// A number of the product is its sum, with FP8 times the scales of both rows; times expert_scales[expert], if there are such;
// plus bias[row of W], if there is one. All float.
//   experts_floats  y float: the numbers
//   experts_one     y elements: their activation, times `other` (positions, outputs) float if that is there
//   experts_two     y elements: activation of gate, times up
//
// Sums are float and go through K in order, 16 elements at a time, from one accumulator, whatever the number of rows. E4M3
// become elements first, exactly.
//
// A block has a tile of up to 16 TILES positions, and two panels of 8 rows of W for each of its warps: of gate and of up, or
// two that follow each other. It goes through K by DEPTH, STAGES copies ahead; weights go to shared memory as they are. Of 32
// elements of row lane / 4 a lane makes what it holds of two products' operands. Which expert a block has is known when
// `route.cu` is done, so nothing is fetched before. grid (outputs, tiles that there may be): blocks without a tile end.
#include "experts/grouped.cuh"

static constexpr int WARPS = 4;

template <int TILES>
struct Shared {
    static constexpr int PITCH = Weights::DEPTH * sizeof(Input) + 16;  // bytes of a row of x
    static constexpr int STAGES = TILES < 4 ? 3 : 2;
    static constexpr int X_BYTES = 16 * TILES * PITCH, BYTES = X_BYTES + 2 * WARPS * Weights::BYTES;
};

// The left operand of 16 rows and 16 elements from `address` on, rows PITCH bytes apart.
template <int PITCH>
static __device__ __forceinline__ void load_rows(uint32_t (&a)[4], const unsigned char* stage, int row, int k) {
    const int lane = threadIdx.x % 32;
#ifdef FP8
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const unsigned char* place = stage + (row + lane / 4 + i % 2 * 8) * PITCH + k + lane % 4 * 2 + i / 2 * 8;
        const Element2 pair = elements_of_e4m3x2(*reinterpret_cast<const uint16_t*>(place));
        a[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
#else
    load_matrices(a, shared_address(stage) + (row + lane % 16) * PITCH + lane / 16 * 16 + k * 2);
#endif
}

// c[p][m]: positions 16 m + lane / 4, + 8 of the tile, outputs 2 (lane % 4), + 1 of panel p, whose rows begin at rows[p].
template <int TILES>
static __device__ __forceinline__ void multiply(float (&c)[2][TILES][4], const Operands& given, const int4& tile,
                                                const int64_t (&rows)[2], int* source_rows) {
    using Memory = Shared<TILES>;
    constexpr int DEPTH = Weights::DEPTH, EACH = 16 / sizeof(Input), PIECES = DEPTH / EACH;
    extern __shared__ __align__(16) unsigned char shared[];
    const int warp = threadIdx.x / 32, inputs = given.inputs, steps = (inputs + DEPTH - 1) / DEPTH;
    for (int i = threadIdx.x; i < 16 * TILES; i += WARPS * 32) {
        const int position = tile.y + min(i, tile.z - 1);
        source_rows[i] = given.sources == nullptr ? position : given.sources[position];
    }
    __syncthreads();
    auto fetch = [&](int step) {
        if (step < steps) {
            const uint32_t stage = shared_address(shared) + step % Memory::STAGES * Memory::BYTES;
            const uint32_t own = stage + Memory::X_BYTES + warp * 2 * Weights::BYTES;
#pragma unroll
            for (int p = 0; p < 2; ++p) Weights::fetch(own + p * Weights::BYTES, given.weights, rows[p], inputs, step);
            for (int piece = threadIdx.x; piece < 16 * TILES * PIECES; piece += WARPS * 32) {
                const int row = piece / PIECES, k = step * DEPTH + piece % PIECES * EACH;
                const bool inside = row < tile.z && k < inputs;
                copy_async(stage + row * Memory::PITCH + piece % PIECES * 16,
                           given.x + (inside ? static_cast<int64_t>(source_rows[row]) * inputs + k : 0), inside);
            }
        }
        commit_copies();
    };
#pragma unroll
    for (int step = 0; step < Memory::STAGES - 1; ++step) fetch(step);
#pragma unroll
    for (int p = 0; p < 2; ++p)
#pragma unroll
        for (int m = 0; m < TILES; ++m)
            for (int i = 0; i < 4; ++i) c[p][m][i] = 0.0f;
    for (int step = 0; step < steps; ++step) {
        wait_for_copies<Memory::STAGES - 2>();
        __syncthreads();
        fetch(step + Memory::STAGES - 1);
        const unsigned char* stage = shared + step % Memory::STAGES * Memory::BYTES;
        const unsigned char* panels = stage + Memory::X_BYTES + warp * 2 * Weights::BYTES;
#pragma unroll 1
        for (int first = 0; first < DEPTH / 32; first += 4) {  // of what K lacks at its end there are zeros
            typename Weights::Handed handed[2];
#pragma unroll
            for (int p = 0; p < 2; ++p) handed[p] = Weights::hand(panels + p * Weights::BYTES, first);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int group = first + i;
                Element8 b[2];
#pragma unroll
                for (int p = 0; p < 2; ++p) b[p] = Weights::group(panels + p * Weights::BYTES, group, handed[p]);
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int m = 0; m < TILES; ++m) {
                        uint32_t a[4];
                        load_rows<Memory::PITCH>(a, stage, 16 * m, group * 32 + half * 16);
#pragma unroll
                        for (int p = 0; p < 2; ++p) mma(c[p][m], a, b[p].word[2 * half], b[p].word[2 * half + 1]);
                    }
            }
        }
    }
}

template <Result RESULT, int TILES>
static __device__ __forceinline__ void product(const Operands& given, const int4* tiles, const int* total,
                                               typename Stored<RESULT>::type* y) {
    __shared__ int source_rows[16 * TILES];
    constexpr bool TWO = RESULT == Result::TWO;
    if (blockIdx.y >= *total) return;
    const int4 tile = tiles[blockIdx.y];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, outputs = given.outputs;
    const int64_t first = static_cast<int64_t>(tile.x) * given.stride;
    const int block = (blockIdx.x * WARPS + warp) * PANEL * (TWO ? 1 : 2);  // this warp's first output
    const int begins[2] = {block, TWO ? block : block + PANEL};
    int64_t rows[2];
#pragma unroll
    for (int p = 0; p < 2; ++p) rows[p] = first + min(begins[p], outputs - PANEL) + (TWO && p ? given.side : 0);
    float c[2][TILES][4];
    multiply<TILES>(c, given, tile, rows, source_rows);
    const float* scales[2] = {given.first_scales, TWO ? given.second_scales : given.first_scales};
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const int within = 16 * m + lane / 4 + 8 * part;
            if (within >= tile.z) continue;
            const int64_t place = static_cast<int64_t>(tile.y + within) * outputs;
            float values[2][2];
#pragma unroll
            for (int p = 0; p < 2; ++p)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int64_t row = rows[p] + lane % 4 * 2 + i;
                    values[p][i] = finished(c[p][m][2 * part + i], given, source_rows[within], row, scales[p], tile.x);
                }
            if constexpr (TWO) {
                if (begins[0] < outputs)
                    *reinterpret_cast<uint32_t*>(y + place + begins[0] + lane % 4 * 2) =
                        pack(activated(given.activation, values[0][0], values[1][0]),
                             activated(given.activation, values[0][1], values[1][1]));
            } else {
#pragma unroll
                for (int p = 0; p < 2; ++p) {
                    if (begins[p] >= outputs) continue;
                    const int64_t at = place + begins[p] + lane % 4 * 2;
                    if constexpr (RESULT == Result::FLOATS) {
                        *reinterpret_cast<float2*>(y + at) = make_float2(values[p][0], values[p][1]);
                    } else {
                        float ups[2] = {1.0f, 1.0f};
                        if (given.other != nullptr) ups[0] = given.other[at], ups[1] = given.other[at + 1];
                        *reinterpret_cast<uint32_t*>(y + at) = pack(activated(given.activation, values[p][0], ups[0]),
                                                                    activated(given.activation, values[p][1], ups[1]));
                    }
                }
            }
        }
}

#define PRODUCT(NAME, RESULT, TILES) \
    EXPERTS_KERNEL(experts_##NAME##_##TILES, RESULT, __launch_bounds__(WARPS * 32), (product<RESULT, TILES>))
#define PRODUCTS(NAME, RESULT) PRODUCT(NAME, RESULT, 1) PRODUCT(NAME, RESULT, 2) PRODUCT(NAME, RESULT, 4)

PRODUCTS(floats, Result::FLOATS)
PRODUCTS(one, Result::ONE)
PRODUCTS(two, Result::TWO)
