// Products of each head with a matrix of its own, as latent attention has them: queries into the space of the latent, and what
// is mixed of latents to values.
//
//   weights  element (head, output, input) at head * head_stride + output * inputs + input; TURNED: input * outputs + output
//   x        (T, H, x_pitch) elements, of which the first `inputs` of each head are read
//   y        (T, H, y_pitch) elements, of which the first `outputs` of each head are written
//
// Of queries, what lies behind the `inputs` of a head of x, `rotated` elements, is rotated by its token's position (`latent.cuh`), and put
// behind the `outputs` of y, by the blocks with a head's first outputs. rotated = 0: there is none.
//
// A block has a head, 64 outputs and TOKENS tokens, or 128 and 128; the grid is (H * tiles of outputs, tiles of tokens). Outputs are rows
// on the left of m16n8k16, tokens columns on the right, so that few tokens waste little; 64 inputs at a time come to shared memory by
// cp.async, two stages deep. Sums are FP32, through the inputs in order, in any tile: bits do not depend on the number of tokens.
// Bytes: weights once for each tile of tokens. FLOPs: 2 H inputs outputs a token.
//
// Dynamic shared memory: two stages of a tile's outputs and tokens, PITCH bytes each.
#include "attention/latent.cuh"

static constexpr int DEPTH = 64;
static constexpr int PITCH = 2 * DEPTH + 16;  // bytes, of a row of 64 elements: ldmatrix finds eight rows in different banks

// What a block computes at once: GROUPS of four warps have their share of the tokens, and each warp 16 GROUPS outputs.
template <int ALL_TOKENS>
struct Tile {
    static constexpr int GROUPS = ALL_TOKENS == 128 ? 2 : 1;
    static constexpr int THREADS = 128 * GROUPS, OUTPUTS = 64 * GROUPS, TOKENS = ALL_TOKENS;
    static constexpr int OWN_OUTPUTS = 16 * GROUPS, OWN_TOKENS = TOKENS / GROUPS;
    static constexpr int TURNED_PITCH = 2 * OUTPUTS + 16;
    static_assert(DEPTH * TURNED_PITCH <= OUTPUTS * PITCH, "weights have equal room either way");
    static constexpr int STAGE_BYTES = (OUTPUTS + TOKENS) * PITCH;
};

// A tile of ROWS rows of COLUMNS elements; what is outside of (rows, columns) is zeros. Columns are in eights.
template <int THREADS, int ROWS, int COLUMNS>
static __device__ __forceinline__ void load_tile(uint32_t target, const Element* source, int64_t pitch, int rows, int columns) {
    constexpr int CHUNKS = COLUMNS / 8;
    for (int index = threadIdx.x; index < ROWS * CHUNKS; index += THREADS) {
        const int row = index / CHUNKS, chunk = index % CHUNKS;
        const bool wanted = row < rows && chunk * 8 < columns;
        copy_async(target + row * (2 * COLUMNS + 16) + chunk * 16, wanted ? source + row * pitch + chunk * 8 : source, wanted);
    }
}

// How the rest of a head's row is rotated.
struct Rotation {
    const int* positions;
    const float2* table;
    int table_rows, rotated, neighbours;

    __device__ __forceinline__ void operator()(const Element* x, int x_pitch, Element* y, int y_pitch, int tokens,
                                               int first_token, int heads) const {
        const int pairs = rotated / 2;
        for (int index = threadIdx.x; index < tokens * pairs; index += blockDim.x) {
            const int token = index / pairs, pair = index % pairs;
            const int position = row_of_table(positions[first_token + token], table_rows);
            const int2 places = places_of(pair, rotated, neighbours);
            const Element* source = x + static_cast<int64_t>(token) * heads * x_pitch;
            Element* target = y + static_cast<int64_t>(token) * heads * y_pitch;
            const float2 result = turned_by(to_float(source[places.x]), to_float(source[places.y]),
                                            table[static_cast<int64_t>(position) * pairs + pair]);
            target[places.x] = to_element(result.x), target[places.y] = to_element(result.y);
        }
    }
};

template <typename Tile, bool TURNED>
static __device__ __forceinline__ void multiply(const Element* weights, int64_t head_stride, const Element* x, int x_pitch,
                                                Element* y, int y_pitch, int tokens, int heads, int outputs, int inputs,
                                                const Rotation& rotation) {
    constexpr int OUTPUTS = Tile::OUTPUTS, TOKENS = Tile::TOKENS, THREADS = Tile::THREADS, PARTS = Tile::GROUPS;
    extern __shared__ __align__(128) unsigned char memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int own_output = warp % 4 * Tile::OWN_OUTPUTS, own_token = warp / 4 * Tile::OWN_TOKENS;
    const int output_tiles = (outputs + OUTPUTS - 1) / OUTPUTS;
    const int head = blockIdx.x / output_tiles, first = blockIdx.x % output_tiles * OUTPUTS;
    const int first_token = blockIdx.y * TOKENS, here = min(tokens - first_token, TOKENS);
    const Element* own = weights + head * head_stride + static_cast<int64_t>(first) * (TURNED ? 1 : inputs);
    const Element* rows = x + (static_cast<int64_t>(first_token) * heads + head) * x_pitch;
    auto left = [&](int stage) { return shared_address(memory) + stage * Tile::STAGE_BYTES; };
    auto right = [&](int stage) { return left(stage) + OUTPUTS * PITCH; };
    auto load_weights = [&](int stage, int input) {
        if (input >= inputs) return;
        if constexpr (TURNED)
            load_tile<THREADS, DEPTH, OUTPUTS>(left(stage), own + static_cast<int64_t>(input) * outputs, outputs, inputs - input,
                                               outputs - first);
        else
            load_tile<THREADS, OUTPUTS, DEPTH>(left(stage), own + input, inputs, outputs - first, inputs - input);
    };
    auto load_rows = [&](int stage, int input) {
        if (input >= inputs) return;
        load_tile<THREADS, TOKENS, DEPTH>(right(stage), rows + input, static_cast<int64_t>(heads) * x_pitch, here,
                                          inputs - input);
    };
    float sums[PARTS][Tile::OWN_TOKENS / 8][4] = {};
    load_weights(0, 0);  // while the kernel ahead still runs
    wait_for_previous(x, rows);
    load_rows(0, 0);
    commit_copies();
    if (first == 0 && rotation.rotated != 0)
        rotation(rows + inputs, x_pitch, y + (static_cast<int64_t>(first_token) * heads + head) * y_pitch + outputs, y_pitch, here,
                 first_token, heads);
    for (int input = 0, stage = 0; input < inputs; input += DEPTH, stage ^= 1) {
        load_weights(stage ^ 1, input + DEPTH);
        load_rows(stage ^ 1, input + DEPTH);
        commit_copies();
        wait_for_copies<1>();
        __syncthreads();
#pragma unroll
        for (int step = 0; step < DEPTH / 16; ++step) {
            uint32_t a[PARTS][4];
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const int output = own_output + part * 16;
                if constexpr (TURNED)  // rows are inputs
                    load_matrices_transposed(a[part], left(stage) + (step * 16 + lane % 8 + lane / 16 * 8) * Tile::TURNED_PITCH +
                                                          (output + lane / 8 % 2 * 8) * 2);
                else
                    load_matrices(a[part], left(stage) + (output + lane % 16) * PITCH + step * 32 + lane / 16 * 16);
            }
#pragma unroll
            for (int n = 0; n < Tile::OWN_TOKENS / 8; n += 2) {
                uint32_t b[4];  // of eight tokens there are no more: the same twice
                const int token = own_token + (TOKENS == 8 ? lane % 8 : n * 8 + lane % 8 + lane / 16 * 8);
                load_matrices(b, right(stage) + token * PITCH + step * 32 + lane / 8 % 2 * 16);
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    mma(sums[part][n], a[part], b[0], b[1]);
                    if constexpr (TOKENS > 8) mma(sums[part][n + 1], a[part], b[2], b[3]);
                }
            }
        }
        __syncthreads();  // the stage is overwritten next
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int n = 0; n < Tile::OWN_TOKENS / 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {  // a token's outputs beside each other
                const uint32_t pair = transposed(pack(sums[part][n][2 * half], sums[part][n][2 * half + 1]));
                const int token = own_token + n * 8 + lane / 4;
                const int output = first + own_output + part * 16 + half * 8 + lane % 4 * 2;
                if (token >= here || output >= outputs) continue;
                const int64_t row = (static_cast<int64_t>(first_token) + token) * heads + head;
                *reinterpret_cast<uint32_t*>(y + row * y_pitch + output) = pair;
            }
}

#define PRODUCT(NAME, TOKENS, TURNED)                                                                             \
    extern "C" __global__ void __launch_bounds__(Tile<TOKENS>::THREADS)                                           \
        NAME(const Element* __restrict__ weights, long long head_stride, const Element* __restrict__ x, int x_pitch, \
             Element* __restrict__ y, int y_pitch, int tokens, int heads, int outputs, int inputs,                \
             const int* __restrict__ positions, const float2* __restrict__ table, int table_rows, int rotated,    \
             int neighbours) {                                                                                    \
        launch_next();                                                                                            \
        multiply<Tile<TOKENS>, TURNED>(weights, head_stride, x, x_pitch, y, y_pitch, tokens, heads, outputs, inputs, \
                                       Rotation{positions, table, table_rows, rotated, neighbours});              \
    }

PRODUCT(latent_product_8, 8, false)
PRODUCT(latent_product_64, 64, false)
PRODUCT(latent_product_128, 128, false)
PRODUCT(latent_product_turned_8, 8, true)
PRODUCT(latent_product_turned_64, 64, true)
PRODUCT(latent_product_turned_128, 128, true)
