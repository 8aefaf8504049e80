// Products of experts with packed weights for up to 8 tokens, on Hopper: what `packed_experts.cu` and `combine.cu` compute, with
// their bits, in two launches.
//
//   few_gate_up  activated (positions, F) elements, of gate and up together, as `packed_two_*` does
//   few_down     x (tokens, width) float += scale * the sum over ranks of shares * down, times *factor; then out = its RMS norm
//
// An expert has at most 8 tokens, and so one tile. A warp has one *panel*, 8 rows of W, with all positions of its tile, and goes
// through K by itself; W is the left operand of mma.sync, half of which nobody reads, made in registers (`packed_maker.cuh`). Sums go
// through K in order, 16 elements at a time, from one accumulator, whatever the number of tokens. What bounds one token is how fast
// a scheduler issues the instructions that make elements; so work is shared out by panels, and each scheduler has nearly as many.
//
// In `few_gate_up` two warps have the panels of gate and up of the same outputs: the second hands its sums to the first, which
// writes activations. All pairs, of all tiles, are shared out evenly to the blocks, as many as there are multiprocessors.
//
// In `few_down` a block has COLUMNS panels, the same ones of all experts that are met. So it has all ranks of these outputs of each
// token, and adds them up in the order of ranks, and to the stream. The block that ends last norms rows: blocks count themselves in
// `arrived`, which is zero before and after. Nobody waits for others.
//
// A warp's packets come by bulk copies to a ring of its own, a *chunk* of 256 elements of K to a stage. `few_down` asks for its first
// ones before `few_gate_up` has ended: which experts are met is known since the launch before that. It may read so much ahead since
// `few_gate_up` lets others go only after it has waited itself, and so all before it has ended then.
//
// Bytes: W once, of experts that are met; activations once for each block, from L2.
#include "experts/grouped.cuh"

#include "common/block_sum.cuh"
#include "common/hopper.cuh"
#include "products/packed/packed_maker.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

static constexpr int FEW = 8;            // tokens, and positions of a tile
static constexpr int MOST_THREADS = 512;  // of a block
static constexpr int MOST_PLACES = 128;   // positions, and tiles

// What a block has in shared memory, as in `few.py`: at 0 barriers, for x and for the stages of each warp; then what warps leave
// for each other; rows of x; and for each warp `stages` chunks of packets, and scales that it has computed.
struct Memory {
    using Maker = PackedMaker<Packed, 1>;
    static constexpr int IN_CHUNK = 256 / Packed::STEP, STAGE = IN_CHUNK * Packed::PACKET;
    static constexpr int SCALES = Maker::SCALES;
    int warps, stages, left_at, x_at, pitch, rings_at, bytes;

    // left: bytes that warps leave; rows of x, of so many inputs.
    __device__ constexpr Memory(int warps, int stages, int left, int rows, int inputs)
        : warps(warps), stages(stages), left_at((8 * (1 + warps * stages) + 15) / 16 * 16), x_at(left_at + left),
          pitch((inputs + Packed::STEP - 1) / Packed::STEP * Packed::STEP * 2 + 16), rings_at(x_at + rows * pitch),
          bytes(rings_at + warps * (stages * STAGE + SCALES)) {}
};

// Bytes that warps leave for each other: the sums of ups, twice; and of all positions, for each panel.
__device__ constexpr int left_of_gate_up(int warps) { return warps / 2 * 2 * 32 * 8; }
__device__ constexpr int left_of_down(int positions, int columns) { return positions * columns * PANEL * 4; }

static __device__ __forceinline__ int same_in_warp(int number) { return __shfl_sync(0xffffffffu, number, 0); }

// A warp's panels, tasks `first`, `first + stride` .. before `end`; `panel(task)` is where one begins, and its packets follow.
template <typename Panel>
struct Panels {
    const Panel panel;
    unsigned char *const ring, *const scales;
    const uint32_t full;
    const int stages, packets, chunks, zero, first, end, stride;
    int asked, asked_chunk = 0, asked_stage = 0;
    const unsigned char* source = nullptr;

    __device__ __forceinline__ Panels(const Panel& panel, const Memory& memory, unsigned char* shared, uint32_t full, int inputs,
                                      int first, int end, int stride)
        : panel(panel), ring(shared + memory.rings_at + same_in_warp(threadIdx.x / 32) * (memory.stages * Memory::STAGE + Memory::SCALES)),
          scales(ring + memory.stages * Memory::STAGE), full(full), stages(memory.stages),
          packets((inputs + Packed::STEP - 1) / Packed::STEP), chunks((packets + Memory::IN_CHUNK - 1) / Memory::IN_CHUNK),
          zero(inputs >> 31), first(first), end(end), stride(stride), asked(first) {}

    // Asks for the next chunk, if there is one. `seen`: of all numbers that were read from the stage that it fills; what is asked
    // for hangs on them, since a copy might else overtake loads that are under way.
    __device__ __forceinline__ void ask(uint32_t seen = 0) {
        if (asked >= end) return;
        if (asked_chunk == 0) source = panel(asked);
        const int bytes = min(Memory::IN_CHUNK, packets - asked_chunk * Memory::IN_CHUNK) * Packed::PACKET +
                          static_cast<int>(seen & static_cast<uint32_t>(zero));
        if (elected()) {
            // BARRIER barrier: of a stage, which is one warp's alone. One lane arrives when it asks for a chunk and expects its bytes; all
            // lanes of that warp wait for it. A stage is asked for again only when its warp has waited for it and is through
            // (`__syncwarp`), so no phase is over before all lanes have seen the one before.
            const uint32_t barrier = full + 8 * asked_stage;
            barrier_expect(barrier, bytes);
            load_bytes(shared_address(ring) + asked_stage * Memory::STAGE, source, bytes, barrier);
        }
        source += Memory::STAGE;
        if (++asked_chunk == chunks) asked_chunk = 0, asked += stride;
        if (++asked_stage == stages) asked_stage = 0;
    }
    __device__ __forceinline__ void ask_ahead() {
        for (int i = 0; i < stages; ++i) ask();
    }

    // finish(acc, task): acc[e] is of row lane / 4 and position 2 (lane % 4) + e; row(task): where a lane's row of x begins, of
    // position lane % 8, 16 lane / 8 bytes further on.
    template <typename Row, typename Finish>
    __device__ __forceinline__ void multiply(Row row, Finish finish) {
        const int boxes = packets * Packed::STEP / 64;
        int stage = 0, parity = 0;
#pragma unroll 1
        for (int task = first; task < end; task += stride) {
            float acc[4] = {};
            const uint32_t own_row = row(task);
#pragma unroll 1
            for (int chunk = 0; chunk < chunks; ++chunk) {
                // BARRIER full: as `barrier` above, where a lane arrives: all lanes of the warp wait for all phases of all stages, in order.
                barrier_wait(full + 8 * stage, parity);
                const typename Memory::Maker maker(ring + stage * Memory::STAGE, scales, 0, Packed::PACKET);
                uint32_t seen = 0;
                const auto quarter_of = [&](int quarter) {
                    uint32_t a[16];
                    maker.make(a, quarter);
                    seen |= a[0] | a[8];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        uint32_t b[4];
                        load_matrices(b, own_row + chunk * 512 + quarter * 128 + half * 64);
#pragma unroll
                        for (int k = 0; k < 2; ++k)
                            mma(acc, reinterpret_cast<const uint32_t(&)[4]>(a[8 * half + 4 * k]), b[2 * k], b[2 * k + 1]);
                    }
                };
                if (Packed::STEP == 256 || boxes - 4 * chunk >= 4) {
#pragma unroll
                    for (int quarter = 0; quarter < 4; ++quarter) quarter_of(quarter);
                } else {
#pragma unroll 1
                    for (int quarter = 0; quarter < boxes - 4 * chunk; ++quarter) quarter_of(quarter);
                }
                __syncwarp();
                ask(seen);
                if (++stage == stages) stage = 0, parity ^= 1;
            }
            finish(acc, task);
        }
    }
};
template <typename Panel>
Panels(const Panel&, const Memory&, unsigned char*, uint32_t, int, int, int, int) -> Panels<Panel>;

// What routing left, in shared memory.
struct Met {
    int4 tiles[MOST_PLACES];
    int of_places[MOST_PLACES];  // sources of positions, or positions of ranks
    float shares[MOST_PLACES];
    int total;
};

// Barriers of a block: the first is of x, the others of warps' stages.
static __device__ __forceinline__ void set_up_barriers(uint32_t x_full, uint32_t full, int stages) {
    if (threadIdx.x % 32 == 0) {
        if (threadIdx.x == 0) barrier_init(x_full, 1);
        for (int i = 0; i < stages; ++i) barrier_init(full + 8 * i, 1);
        publish_barriers();
    }
    __syncwarp();
}

// The first warp asks for rows of x, and makes zeros of what the last packet has beyond K.
static __device__ __forceinline__ void ask_for_rows(const Element* x, int rows, int inputs, const Memory& memory, uint32_t x_full,
                                                    unsigned char* shared) {
    const int lane = threadIdx.x % 32, bytes = inputs * static_cast<int>(sizeof(Element));
    if (lane == 0) barrier_expect(x_full, rows * bytes);
    __syncwarp();
    for (int i = lane; i < rows; i += 32) {
        const uint32_t target = shared_address(shared) + memory.x_at + i * memory.pitch;
        for (int at = bytes; at < memory.pitch - 16; at += 16) store_zeros(target + at);
        load_bytes(target, x + static_cast<int64_t>(i) * inputs, bytes, x_full);
    }
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS, 2)
    few_gate_up(const Element* __restrict__ x, const int* __restrict__ sources, const int4* __restrict__ tiles,
                const int* __restrict__ total, const unsigned char* __restrict__ weights, const float* __restrict__ bias,
                const float* __restrict__ first_scales, const float* __restrict__ second_scales, Element* y, int outputs,
                int inputs, int stride, int side, int activation, int tokens, int choices, int stages) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ Met met;
    KERNEL_BEGINS();
    const int warp = same_in_warp(threadIdx.x / 32), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warps = blockDim.x / 32, pairs = warps / 2;
    const Memory memory(warps, stages, left_of_gate_up(warps), tokens, inputs);
    // BARRIER x_full: of x, for one filling. A lane of the first warp arrives, that expects the bytes which its lanes ask for; all
    // threads wait for it, once.
    const uint32_t x_full = shared_address(shared), full = x_full + 8 + 8 * stages * warp;
    set_up_barriers(x_full, full, stages);
    wait_for_previous(x, sources, tiles, total, y);
    launch_next();  // not before: `few_down` reads what routing left before it waits
    for (int i = threadIdx.x; i < choices; i += blockDim.x) met.tiles[i] = tiles[i], met.of_places[i] = sources[i];
    if (threadIdx.x == 0) met.total = *total;
    if (warp == 0) ask_for_rows(x, tokens, inputs, memory, x_full, shared);
    __syncthreads();
    const int in_tile = outputs / PANEL, items = met.total * in_tile, blocks = gridDim.x, block = blockIdx.x;
    const int begin = items * block / blocks, end = items * (block + 1) / blocks;
    const int packets = (inputs + Packed::STEP - 1) / Packed::STEP;
    // The first row of W of a warp's item.
    const auto row_of = [&](int item) {
        return static_cast<int64_t>(met.tiles[item / in_tile].x) * stride + item % in_tile * PANEL + warp % 2 * side;
    };
    Panels panels([&](int item) { return weights + row_of(item) / PANEL * packets * Packed::PACKET; }, memory, shared, full,
                  inputs, begin + warp / 2, end, pairs);
    panels.ask_ahead();
    barrier_wait(x_full, 0);
    int turn = 0;
    panels.multiply(
        [&](int item) {
            const int4 tile = met.tiles[item / in_tile];
            const int row = met.of_places[tile.y + min(lane % 8, tile.z - 1)];
            return shared_address(shared) + memory.x_at + row * memory.pitch + lane / 8 * 16;
        },
        [&](const float(&acc)[4], int item) {
            const int4 tile = met.tiles[item / in_tile];
            const float* scales = warp % 2 ? second_scales : first_scales;
            float own[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                own[e] = acc[e];
                if (scales != nullptr) own[e] = __fmul_rn(own[e], scales[tile.x]);
                if (bias != nullptr) own[e] = __fadd_rn(own[e], bias[row_of(item) + g]);
            }
            auto* ups = reinterpret_cast<float2*>(shared + memory.left_at) + (turn % 2 * pairs + warp / 2) * 32 + lane;
            if (warp % 2) *ups = make_float2(own[0], own[1]);
            // BARRIER pair: 64 threads arrive and wait, those of the two warps of a pair, at a barrier of their own, once for each item. What
            // the second leaves for the first has two places by turns: it is written again when the first has come once more.
            const int pair = 1 + warp / 2;
            named_wait(pair, 64);
            if (warp % 2 == 0) {
                const float2 up = *ups;
                const uint32_t word = transposed(pack(activated(activation, own[0], up.x), activated(activation, own[1], up.y)));
                if (g < tile.z)
                    *reinterpret_cast<uint32_t*>(y + static_cast<int64_t>(tile.y + g) * outputs + item % in_tile * PANEL + 2 * t) = word;
            }
            ++turn;
        });
}

// Norms of rows of x, by warps that have 256 PIECES values of a row together, in the order in which `combine.cu` adds squares up:
// `wide`: warps of one of its blocks.
static __device__ __forceinline__ void norm_rows(const float* x, const float* weight, float eps, Element* out, int rows, int width,
                                                 int pieces, int wide) {
    __shared__ float partial[FEW][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const auto each = [&](int job, auto take) {
        for (int piece = 0; piece < pieces; ++piece)
            if (const int column = (piece * wide * 32 + job % wide * 32 + lane) * 8; column < width) {
                const int64_t at = static_cast<int64_t>(job / wide) * width + column;
                float values[8];
                load8(x + at, values);
                take(values, column, at);
            }
    };
    if (weight != nullptr) {
        for (int job = warp; job < rows * wide; job += warps) {
            float squares = 0.0f;
            each(job, [&](const float(&values)[8], int, int64_t) {
#pragma unroll
                for (int i = 0; i < 8; ++i) squares = fmaf(values[i], values[i], squares);
            });
            squares = warp_sum(squares);
            if (lane == 0) partial[job / wide][job % wide] = squares;
        }
        __syncthreads();
    }
    for (int job = warp; job < rows * wide; job += warps) {
        float scale = 1.0f;
        if (weight != nullptr) {
            const float sum = warp_sum(lane < wide ? partial[job / wide][lane] : 0.0f);
            scale = 1.0f / sqrtf(sum / static_cast<float>(width) + eps);
        }
        each(job, [&](float(&values)[8], int column, int64_t at) {
            if (weight != nullptr) {
                float gains[8];
                load8(weight + column, gains);
#pragma unroll
                for (int i = 0; i < 8; ++i) values[i] *= scale * gains[i];
            }
            *reinterpret_cast<Element8*>(out + at) = pack(values);
        });
    }
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS, 2)
    few_down(const Element* __restrict__ activated_rows, const int* __restrict__ places, const float* __restrict__ shares,
             const int4* __restrict__ tiles, const int* __restrict__ total, const unsigned char* __restrict__ weights,
             const float* __restrict__ bias, const float* __restrict__ scales, float scale, const float* __restrict__ factor,
             float* x, const float* __restrict__ weight, float eps, Element* out, unsigned* arrived, int width, int inputs,
             int tokens, int used, int columns, int pieces, int wide, int stages) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ Met met;
    __shared__ bool last;
    KERNEL_BEGINS();
    launch_next();
    const int warp = same_in_warp(threadIdx.x / 32), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warps = blockDim.x / 32, choices = tokens * used;
    const Memory memory(warps, stages, left_of_down(choices, columns), choices, inputs);
    // BARRIER x_full: of activations, for one filling. A lane of the first warp arrives, that expects the bytes which its lanes ask for;
    // all threads wait for it, once.
    const uint32_t x_full = shared_address(shared), full = x_full + 8 + 8 * stages * warp;
    set_up_barriers(x_full, full, stages);
    // Around L1, as what others have just written, and by `__ldcg` not before this.
    for (int i = threadIdx.x; i < choices; i += blockDim.x) {
        met.tiles[i] = __ldcg(tiles + i);
        met.of_places[i] = __ldcg(places + i), met.shares[i] = __ldcg(shares + i);
    }
    if (threadIdx.x == 0) met.total = __ldcg(total);
    __syncthreads();
    const int first_panel = blockIdx.x * columns, own = min(columns, width / PANEL - first_panel), tasks = met.total * own;
    const int packets = (inputs + Packed::STEP - 1) / Packed::STEP;
    const auto row_of = [&](int task) {
        return static_cast<int64_t>(met.tiles[task / own].x) * width + (first_panel + task % own) * PANEL;
    };
    Panels panels([&](int task) { return weights + row_of(task) / PANEL * packets * Packed::PACKET; }, memory, shared, full, inputs,
                  warp, tasks, warps);
    panels.ask_ahead();
    wait_for_previous(activated_rows, x, out, arrived);
    if (warp == 0) {
        const int4 end = met.tiles[max(met.total - 1, 0)];
        ask_for_rows(activated_rows, met.total > 0 ? end.y + end.z : 0, inputs, memory, x_full, shared);
    }
    // Which number of the stream this thread adds to: there are as many threads, at least.
    const auto token_of = [&] { return static_cast<int>(threadIdx.x) / (own * PANEL); };
    const auto column_of = [&] { return static_cast<int>(threadIdx.x) % (own * PANEL); };
    const auto place_of = [&] { return x + static_cast<int64_t>(token_of()) * width + first_panel * PANEL + column_of(); };
    const float before = token_of() < tokens ? *place_of() : 0.0f;
    float* const sums = reinterpret_cast<float*>(shared + memory.left_at);
    __syncthreads();  // zeros beyond K are there
    barrier_wait(x_full, 0);
    panels.multiply(
        [&](int task) {
            const int4 tile = met.tiles[task / own];
            const int row = tile.y + min(lane % 8, tile.z - 1);
            return shared_address(shared) + memory.x_at + row * memory.pitch + lane / 8 * 16;
        },
        [&](const float(&acc)[4], int task) {
            const int4 tile = met.tiles[task / own];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float sum = acc[e];
                if (scales != nullptr) sum = __fmul_rn(sum, scales[tile.x]);
                if (bias != nullptr) sum = __fadd_rn(sum, bias[row_of(task) + g]);
                if (2 * t + e < tile.z) sums[(tile.y + 2 * t + e) * columns * PANEL + task % own * PANEL + g] = sum;
            }
        });
    __syncthreads();
    if (const int token = token_of(); token < tokens) {
        const float times = factor == nullptr ? 1.0f : *factor;
        float sum = 0.0f;
        for (int rank = 0; rank < used; ++rank) {
            const int position = met.of_places[token * used + rank];
            if (position >= 0) sum = fmaf(met.shares[token * used + rank], sums[position * columns * PANEL + column_of()], sum);
        }
        *place_of() = fmaf(scale, sum, before) * times;
    }
    if (out == nullptr) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(arrived, 1) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    if (threadIdx.x == 0) *arrived = 0;
    norm_rows(x, weight, eps, out, tokens, width, pieces, wide);
}

#endif
