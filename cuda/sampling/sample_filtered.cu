// Draws tokens of rows with top-k, top-p or min-p, or a temperature near 0: thresholds by search, then Gumbel-max.
//
// Arguments as in sample.cu, and the number of rows; rows that it draws are left alone here. A block of 1,024 threads
// takes every gridDim.x-th row, at most 1,024 of them, and reads each 3 to 5 times (mostly from L2), scaled as
// x = (l - max l) / T in FP32, exactly as the definition has it:
//   1. the maximum;
//   2. a histogram of x: 2,048 bins of 1/64 over (-32, 0], each with its count and its mass sum e^x. Masses are
//      fixed-point numbers relative to the bin's edge, in two 32-bit words (27 bits, V up to 2^19): integer atomics in
//      shared memory, whose sum does not depend on their order;
//   3. the k-th largest lies in a bin that the counts tell: the values of that bin are gathered and sorted;
//   4. for top-p likewise, by the cumulative mass of what top-k left, summed in FP64;
//   5. the draw, over what is not below any threshold.
// So top-k is exact, and top-p as exact as expf. What is below -32 has under V e^-32 of the mass and counts as none.
// Where a bin holds more than LIST values, or the k-th largest is below -32, thresholds come by bisection of the 32 bits
// of floats instead: a pass over the row for each bit, exact, slow, and rare.
#include "sampling/sampling.cuh"

static constexpr int THREADS = 1024;
static constexpr int BINS = 2048;
static constexpr float BINS_PER_UNIT = 64.0f;
static constexpr int LIST = 4096;

struct Scratch {
    unsigned count[BINS + 1];
    unsigned mass_high[BINS], mass_low[BINS];
    float list[LIST];
    int listed;
    int bin;            // results of `find_*`, for all threads
    unsigned above;     // tokens in the bins before it
    double mass_above;  // and their mass
    double total;
    float threshold;
    double sums[32];
    int counts[32];
    float maxima[32];
    Best best[32];
};

struct Scaled {
    Row row;
    float maximum, temperature;
    int blocks;

    __device__ __forceinline__ void load(int block, float (&x)[4]) const {
        load_logits(row, block, x);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = __fdiv_rn(x[i] - maximum, temperature);
    }
};

static __device__ __forceinline__ int bin_of(float x) {
    return x > -32.0f ? min(static_cast<int>(-x * BINS_PER_UNIT), BINS - 1) : BINS;
}

// Sum over the block, in all threads; the order of additions is fixed.
static __device__ double block_sum(double value, Scratch& scratch) {
    value = warp_sum_double(value);
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch.sums[threadIdx.x / 32] = value;
    __syncthreads();
    return warp_sum_double(scratch.sums[threadIdx.x % 32]);
}

static __device__ int block_count(int value, Scratch& scratch) {
    value = __reduce_add_sync(0xffffffffu, value);
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch.counts[threadIdx.x / 32] = value;
    __syncthreads();
    return __reduce_add_sync(0xffffffffu, scratch.counts[threadIdx.x % 32]);
}

static __device__ void make_histogram(const Scaled& source, Scratch& scratch) {
    for (int i = threadIdx.x; i <= BINS; i += THREADS) {
        scratch.count[i] = 0;
        if (i < BINS) scratch.mass_high[i] = scratch.mass_low[i] = 0;
    }
    __syncthreads();
#pragma unroll 1
    for (int block = threadIdx.x; block < source.blocks; block += THREADS) {
        float x[4];
        source.load(block, x);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (block * 4 + i >= source.row.vocab) continue;
            const int bin = bin_of(x[i]);
            atomicAdd(&scratch.count[bin], 1u);
            if (bin == BINS) continue;
            const unsigned mass = __float2uint_rn(expf(x[i] + bin / BINS_PER_UNIT) * 0x1p27f);
            atomicAdd(&scratch.mass_high[bin], mass >> 14);
            atomicAdd(&scratch.mass_low[bin], mass & 0x3fffu);
        }
    }
    __syncthreads();
}

static __device__ __forceinline__ double mass_of(const Scratch& scratch, int bin) {
    const double fixed = static_cast<double>(scratch.mass_high[bin]) * 16384.0 + scratch.mass_low[bin];
    return fixed == 0.0 ? 0.0 : fixed * 0x1p-27 * exp(-bin / static_cast<double>(BINS_PER_UNIT));
}

// Where the k-th largest lies: bin (BINS: below all) and the number of tokens above it.
static __device__ void find_rank(Scratch& scratch, unsigned k) {
    if (threadIdx.x < 32) {
        const int first = threadIdx.x * (BINS / 32);
        unsigned own = 0;
        for (int i = 0; i < BINS / 32; ++i) own += scratch.count[first + i];
        unsigned inclusive = own;
#pragma unroll
        for (int offset = 1; offset < 32; offset <<= 1) {
            const unsigned other = __shfl_up_sync(0xffffffffu, inclusive, offset);
            if (threadIdx.x >= offset) inclusive += other;
        }
        if (threadIdx.x == 31 && inclusive < k) scratch.bin = BINS, scratch.above = inclusive;
        unsigned above = inclusive - own;
        if (above < k && k <= inclusive) {
            int bin = first;
            while (above + scratch.count[bin] < k) above += scratch.count[bin++];
            scratch.bin = bin;
            scratch.above = above;
        }
    }
    __syncthreads();
}

// The mass of bins 0 .. bins - 1, in scratch.total.
static __device__ void sum_bins(Scratch& scratch, int bins) {
    double own = 0.0;
    for (int i = threadIdx.x; i < bins; i += THREADS) own += mass_of(scratch, i);
    own = block_sum(own, scratch);
    if (threadIdx.x == 0) scratch.total = own;
    __syncthreads();
}

// The first of `bins` bins whose mass, with that before, reaches `target` (`bins`: none), and the mass before it.
static __device__ void find_mass(Scratch& scratch, int bins, double target) {
    if (threadIdx.x < 32) {
        const int first = threadIdx.x * (BINS / 32);
        double own = 0.0;
        for (int i = first; i < min(first + BINS / 32, bins); ++i) own += mass_of(scratch, i);
        double inclusive = own;
#pragma unroll
        for (int offset = 1; offset < 32; offset <<= 1) {
            const double other = __shfl_up_sync(0xffffffffu, inclusive, offset);
            if (threadIdx.x >= offset) inclusive += other;
        }
        // The lane before says where this one begins: no gap and no overlap by rounding.
        double before = __shfl_up_sync(0xffffffffu, inclusive, 1);
        if (threadIdx.x == 0) before = 0.0;
        if (threadIdx.x == 31 && inclusive < target) scratch.bin = bins, scratch.mass_above = inclusive;
        if (before < target && target <= inclusive) {
            int bin = first;
            const int last = min(first + BINS / 32, bins) - 1;
            while (bin < last && before + mass_of(scratch, bin) < target) before += mass_of(scratch, bin++);
            scratch.bin = bin;
            scratch.mass_above = before;
        }
    }
    __syncthreads();
}

// Collects the values of a bin and sorts them, largest first (bitonic). False where they are too many.
static __device__ bool gather_bin(const Scaled& source, Scratch& scratch, int bin) {
    const int count = static_cast<int>(scratch.count[bin]);
    if (count > LIST) return false;
    int size = 32;
    while (size < count) size *= 2;
    if (threadIdx.x == 0) scratch.listed = 0;
    for (int i = threadIdx.x; i < size; i += THREADS) scratch.list[i] = negative_infinity();
    __syncthreads();
#pragma unroll 1
    for (int block = threadIdx.x; block < source.blocks; block += THREADS) {
        float x[4];
        source.load(block, x);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (block * 4 + i < source.row.vocab && bin_of(x[i]) == bin)
                scratch.list[min(atomicAdd(&scratch.listed, 1), LIST - 1)] = x[i];
    }
    __syncthreads();
    for (int width = 2; width <= size; width *= 2)
        for (int stride = width / 2; stride > 0; stride /= 2) {
            for (int i = threadIdx.x; i < size / 2; i += THREADS) {
                const int low = 2 * i - (i & (stride - 1)), high = low + stride;
                const float a = scratch.list[low], b = scratch.list[high];
                const bool descending = (low & width) == 0;
                if (descending ? a < b : a > b) scratch.list[low] = b, scratch.list[high] = a;
            }
            __syncthreads();
        }
    return true;
}

// Of the sorted list, cut off below `kth`: its mass in scratch.total (target < 0), or the last value that has less
// than `target` before it, in scratch.threshold.
static __device__ void walk_list(Scratch& scratch, float kth, double before, double target) {
    if (threadIdx.x < 32) {
        float threshold = scratch.list[0];
        const int count = scratch.listed;
        bool done = false;
        for (int base = 0; base < count && !done; base += 32) {
            const int i = base + threadIdx.x;
            const bool counts = i < count && scratch.list[i] >= kth;
            const double own = counts ? static_cast<double>(expf(scratch.list[i])) : 0.0;
            double inclusive = own;
#pragma unroll
            for (int offset = 1; offset < 32; offset <<= 1) {
                const double other = __shfl_up_sync(0xffffffffu, inclusive, offset);
                if (threadIdx.x >= offset) inclusive += other;
            }
            double exclusive = __shfl_up_sync(0xffffffffu, inclusive, 1);
            if (threadIdx.x == 0) exclusive = 0.0;
            if (target >= 0.0) {
                const unsigned kept = __ballot_sync(0xffffffffu, counts && before + exclusive < target);
                if (kept != 0) threshold = scratch.list[base + 31 - __clz(kept)];
                done = kept != 0xffffffffu;
            }
            before += __shfl_sync(0xffffffffu, inclusive, 31);
        }
        if (threadIdx.x == 0) {
            if (target < 0.0)
                scratch.total = before;
            else
                scratch.threshold = threshold;
        }
    }
    __syncthreads();
}

static __device__ float bisect_rank(const Scaled& source, Scratch& scratch, int k) {
    unsigned key = 0;  // the largest key that at least k tokens reach
    for (int bit = 31; bit >= 0; --bit) {
        const unsigned tried = key | 1u << bit;
        int reached = 0;
#pragma unroll 1
        for (int block = threadIdx.x; block < source.blocks; block += THREADS) {
            float x[4];
            source.load(block, x);
#pragma unroll
            for (int i = 0; i < 4; ++i) reached += block * 4 + i < source.row.vocab && ordered(x[i]) >= tried;
        }
        if (block_count(reached, scratch) >= k) key = tried;
    }
    return from_ordered(key);
}

// The mass of tokens not below `kth` whose key is above `key`.
static __device__ double mass_above(const Scaled& source, Scratch& scratch, float kth, unsigned key) {
    double own = 0.0;
#pragma unroll 1
    for (int block = threadIdx.x; block < source.blocks; block += THREADS) {
        float x[4];
        source.load(block, x);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (x[i] >= kth && ordered(x[i]) > key) own += expf(x[i]);
    }
    return block_sum(own, scratch);
}

static __device__ float bisect_mass(const Scaled& source, Scratch& scratch, float kth, float top_p) {
    const double target = fmax(static_cast<double>(top_p) * mass_above(source, scratch, kth, 0u), 1e-300);
    unsigned key = 0;  // the largest key above which there is no less than the target
    for (int bit = 31; bit >= 0; --bit) {
        const unsigned tried = key | 1u << bit;
        if (mass_above(source, scratch, kth, tried) >= target) key = tried;
    }
    return from_ordered(key + 1);
}

static __device__ float find_threshold(const Scaled& source, Scratch& scratch, int top_k, float top_p) {
    const bool ranks = top_k > 0 && top_k < source.row.vocab;
    float kth = negative_infinity();
    if (!ranks && !(top_p < 1.0f)) return kth;
    make_histogram(source, scratch);
    int k_bin = BINS;
    double k_mass = 0.0, k_before = 0.0;  // of its bin's values not below kth; of the bins before
    if (ranks) {
        find_rank(scratch, top_k);
        k_bin = scratch.bin;
        const unsigned above = scratch.above;
        if (k_bin == BINS || !gather_bin(source, scratch, k_bin)) {
            kth = bisect_rank(source, scratch, top_k);
            return top_p < 1.0f ? fmaxf(kth, bisect_mass(source, scratch, kth, top_p)) : kth;
        }
        kth = scratch.list[top_k - above - 1];
        if (!(top_p < 1.0f)) return kth;
        walk_list(scratch, kth, 0.0, -1.0);
        k_mass = scratch.total;
        __syncthreads();
    }
    sum_bins(scratch, k_bin);
    k_before = scratch.total;
    const double target = fmax(static_cast<double>(top_p) * (k_before + k_mass), 1e-300);
    find_mass(scratch, k_bin, target);
    const int bin = scratch.bin;
    const double before = scratch.mass_above;
    __syncthreads();
    if (bin == k_bin) {
        if (!ranks) return kth;  // what is below the bins decides: rounding, for a top_p of nearly 1
        walk_list(scratch, kth, before, target);  // the list still holds the bin of the k-th
        return fmaxf(kth, scratch.threshold);
    }
    if (!gather_bin(source, scratch, bin)) return fmaxf(kth, bisect_mass(source, scratch, kth, top_p));
    walk_list(scratch, kth, before, target);
    return fmaxf(kth, scratch.threshold);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sample_filtered(const float* __restrict__ logits, int vocab, const Draw* __restrict__ draws, Slot* slots,
                    int* __restrict__ out_tokens, int rows) {
    __shared__ Scratch scratch;
    launch_next();
    wait_for_previous(logits);
    const auto is_mine = [&](int number) {
        const int slot = number < rows ? draws[number].slot : -1;
        return slot >= 0 && needs_filter(slots[slot], vocab);
    };
    // Mostly there is nothing to do, which all rows of a block can say at once.
    if (!__syncthreads_or(is_mine(blockIdx.x + threadIdx.x * gridDim.x))) return;
#pragma unroll 1
    for (int number = blockIdx.x; number < rows; number += gridDim.x) {
        if (!is_mine(number)) continue;
        __syncthreads();  // what the row before had in `scratch` was read
        const Draw draw = draws[number];
        Slot& slot = slots[draw.slot];
        const float temperature = slot.temperature, min_p = slot.min_p;
        const Row row = row_of(logits, number, vocab, slot);
        const int blocks = (vocab + 3) / 4;

        float maximum = negative_infinity();
        bool bad = false;
#pragma unroll 1
        for (int block = threadIdx.x; block < blocks; block += THREADS) {
            float x[4];
            bad |= load_logits(row, block, x);
#pragma unroll
            for (int i = 0; i < 4; ++i) maximum = fmaxf(maximum, x[i]);
        }
        maximum = warp_max(maximum);
        if (threadIdx.x % 32 == 0) scratch.maxima[threadIdx.x / 32] = maximum;
        bad = __syncthreads_or(bad);
        maximum = warp_max(scratch.maxima[threadIdx.x % 32]);
        bad = bad || maximum == negative_infinity();
        if (bad) {  // the same for all threads
            if (threadIdx.x == 0) finish_row(not_a_number(), number, slot, vocab, out_tokens);
            continue;
        }

        const Scaled source{row, maximum, temperature, blocks};
        float threshold = find_threshold(source, scratch, slot.top_k, slot.top_p);
        if (min_p > 0.0f) threshold = fmaxf(threshold, logf(min_p));
        // The best, at 0, gets no less noise than -3.
        threshold = fmaxf(threshold, -LARGEST_NOISE - 3.0f);

        const unsigned position = static_cast<unsigned>(draw.position);
        const unsigned long long seed = slot.seed;
        Best best{negative_infinity(), 0.0f, 0x7fffffff};
#pragma unroll 1
        for (int block = threadIdx.x; block < blocks; block += THREADS) {
            float x[4];
            source.load(block, x);
            const float largest = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
            if (largest < threshold || largest + LARGEST_NOISE < best.high) continue;
            const uint4 words4 = philox(block, position, seed);
            const unsigned word[4] = {words4.x, words4.y, words4.z, words4.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (x[i] < threshold || x[i] + LARGEST_NOISE < best.high) continue;
                const Best candidate{x[i] + gumbel(word[i]), 0.0f, block * 4 + i};
                if (beats(candidate, best)) best = candidate;
            }
        }
        best = best_of_block(best, scratch.best);
        if (threadIdx.x == 0) finish_row(best, number, slot, vocab, out_tokens);
    }
}
