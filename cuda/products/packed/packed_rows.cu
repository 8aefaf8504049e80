// Products of few rows with packed weights on every GPU from sm_80 on, by mma.sync.
//
//   x  (rows, K) elements, up to 64 rows     W  (outputs, K) packed (common/packed.cuh), for -DFORMAT
//   y  (rows, outputs), rows `pitch` numbers apart: elements, float, or float that the product is added to
//
// Sums are float and go through K in order, 16 elements at a time, from one accumulator, as those of elements do (on an H200,
// where the tests hold them together; GPUs before Hopper were not at hand).
//
// A warp has a panel, 8 outputs, and all rows, in TILES tiles of 16; the four of a block share x. They go through K by 256,
// STAGES copies ahead: the weights' bytes go to shared memory as they are. A lane makes chunk lane % 4 of a group of the panel's
// row lane / 4: what it holds of two products' operands.
//
// Bytes: W once, x from L2 for each block. K / 16 dependent products, of rows that a whole K is not cut for, set the time of
// small matrices.
#include "common/packed.cuh"

static constexpr int WARPS = 4, DEPTH = 256;
static constexpr int PACKETS = DEPTH / Packed::STEP, PANEL_BYTES = PACKETS * Packed::PACKET;
static constexpr int PITCH = DEPTH * 2 + 16;  // bytes of a row of x in shared memory: ldmatrix meets no conflict

template <int TILES>
struct Shared {
    static constexpr int STAGES = TILES < 4 ? 3 : 2;
    static constexpr int X_BYTES = 16 * TILES * PITCH, BYTES = X_BYTES + WARPS * PANEL_BYTES;
};

// c[m]: rows 16 m + lane / 4, + 8 of the product, outputs 2 (lane % 4), + 1 of the warp's panel.
template <int TILES>
static __device__ __forceinline__ void multiply(float (&c)[TILES][4], const Element* x, const unsigned char* weights, int rows,
                                                int inputs, int panel, int panels) {
    using Memory = Shared<TILES>;
    extern __shared__ __align__(16) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int steps = (inputs + DEPTH - 1) / DEPTH, packets = (inputs + Packed::STEP - 1) / Packed::STEP;
    const unsigned char* own = weights + static_cast<int64_t>(min(panel, panels - 1)) * packets * Packed::PACKET;
    auto fetch_weights = [&](int step) {
        if (step < steps) {
            const int bytes = min(PACKETS, packets - step * PACKETS) * Packed::PACKET;
            const uint32_t target =
                shared_address(shared) + step % Memory::STAGES * Memory::BYTES + Memory::X_BYTES + warp * PANEL_BYTES;
            for (int at = lane * 16; at < bytes; at += 32 * 16)
                copy_async(target + at, own + static_cast<int64_t>(step) * PANEL_BYTES + at, true);
        }
    };
    auto fetch_x = [&](int step) {
        if (step < steps) {
            const uint32_t target = shared_address(shared) + step % Memory::STAGES * Memory::BYTES;
            for (int piece = threadIdx.x; piece < 16 * TILES * (DEPTH / 8); piece += WARPS * 32) {
                const int row = piece / (DEPTH / 8), k = step * DEPTH + piece % (DEPTH / 8) * 8;
                const bool inside = row < rows && k < inputs;
                copy_async(target + row * PITCH + piece % (DEPTH / 8) * 16,
                           x + (inside ? static_cast<int64_t>(row) * inputs + k : 0), inside);
            }
        }
        commit_copies();
    };
#pragma unroll
    for (int step = 0; step < Memory::STAGES - 1; ++step) fetch_weights(step);
    wait_for_previous(x);
#pragma unroll
    for (int step = 0; step < Memory::STAGES - 1; ++step) fetch_x(step);
#pragma unroll
    for (int m = 0; m < TILES; ++m)
        for (int i = 0; i < 4; ++i) c[m][i] = 0.0f;
    for (int step = 0; step < steps; ++step) {
        wait_for_copies<Memory::STAGES - 2>();
        __syncthreads();
        fetch_weights(step + Memory::STAGES - 1);
        fetch_x(step + Memory::STAGES - 1);
        const unsigned char* stage = shared + step % Memory::STAGES * Memory::BYTES;
        const unsigned char* packet = stage + Memory::X_BYTES + warp * PANEL_BYTES;
        const uint32_t a_at = shared_address(stage) + lane % 16 * PITCH + lane / 16 * 16;
        const int groups = min(DEPTH, inputs - step * DEPTH) / 32;
#pragma unroll 2
        for (int group = 0; group < groups; ++group) {
            constexpr int GROUPS = Packed::STEP / 32;
            const unsigned char* place = packet + group / GROUPS * Packed::PACKET;
            const auto scale = packed::scale_of<Packed>(place, lane / 4, group % GROUPS);
            const Element8 b = Packed::eight(Packed::raw(place, lane / 4, group % GROUPS * 4 + lane % 4), scale);
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int m = 0; m < TILES; ++m) {
                    uint32_t a[4];
                    load_matrices(a, a_at + 16 * m * PITCH + group * 64 + half * 32);
                    mma(c[m], a, b.word[2 * half], b.word[2 * half + 1]);
                }
        }
    }
}

struct Elements {
    using Result = Element;
    static __device__ __forceinline__ void put(Result* place, float value) { *place = to_element(value); }
};
struct Floats {
    using Result = float;
    static __device__ __forceinline__ void put(Result* place, float value) { *place = value; }
};
struct Added {
    using Result = float;
    static __device__ __forceinline__ void put(Result* place, float value) { *place = __fadd_rn(*place, value); }
};

template <typename Store, int TILES>
static __device__ __forceinline__ void product(const Element* x, const unsigned char* weights, typename Store::Result* y, int rows,
                                               int outputs, int inputs, int pitch) {
    float c[TILES][4];
    const int panels = (outputs + packed::ROWS - 1) / packed::ROWS, panel = blockIdx.x * WARPS + threadIdx.x / 32;
    launch_next();
    multiply<TILES>(c, x, weights, rows, inputs, panel, panels);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = 16 * m + lane / 4 + i / 2 * 8, output = panel * packed::ROWS + 2 * (lane % 4) + i % 2;
            if (row < rows && output < outputs) Store::put(y + static_cast<int64_t>(row) * pitch + output, c[m][i]);
        }
}

#define PRODUCT(NAME, STORE, TILES)                                                                                    \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                           \
        packed_##NAME##_##TILES(const Element* __restrict__ x, const unsigned char* __restrict__ weights, STORE::Result* y,     \
                       int rows, int outputs, int inputs, int pitch) {                                                 \
        product<STORE, TILES>(x, weights, y, rows, outputs, inputs, pitch);                                            \
    }
#define PRODUCTS(NAME, STORE) PRODUCT(NAME, STORE, 1) PRODUCT(NAME, STORE, 2) PRODUCT(NAME, STORE, 4)

PRODUCTS(elements, Elements)
PRODUCTS(floats, Floats)
PRODUCTS(added, Added)
