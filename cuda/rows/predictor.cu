// What a block that predicts further tokens (MTP) has beside its layer. It guesses behind the last token that a sequence draws in
// a step, and then behind its own guesses; `worker/runners/gpu/predicting.py` has the order.
//
//   choose_draws  of the draws of each of `count` sequences, groups (count, 2): the first and how many, the last behind guesses
//                 that were all right, and what a guess behind it needs: chosen (count, 4): the draw, the place of the token
//                 before it, that token's row of the cache, and how many guesses may follow; rows (count,): its row of the step;
//                 guessing (count,): a draw for each; slots (count,): its parameters, without penalties
//   next_tokens   out[r] = known[r], or where that is negative the token of draw -1 - known[r]; 0 if that is not a number
//   pair_rows     out (T, 2 width) elements: the RMS norm of embeddings (T, width) float, and that of states (T, width), which
//                 are elements (pair_rows) or floats (pair_float_rows)
//   go_on         a guess was drawn behind each of `count` sequences: it is noted in guesses (count, 1 + GUESSES), behind the
//                 number of the draw, and is the token of the next one, for which position, row of the cache, context and piece
//                 are made
//
// Guesses stay within the page of the last token that was computed: the one behind it may be nobody's yet. Where no more may
// follow, a sequence goes on for nothing, with its first token alone, and writes to the page for padding. All but pair_rows are
// of a thread for each sequence or row; that reads 6 to 8 and writes 2 bytes for a number, by a block for each half of a row.
#include "common/block_sum.cuh"
#include "sampling/slots.cuh"

static constexpr int GUESSES = 3, NO_GUESS = -1;
static constexpr int TOKENS_OF_A_PAGE = 16;

extern "C" __global__ void __launch_bounds__(32)
    choose_draws(const int2* __restrict__ groups, const Draw* __restrict__ draws, const int* __restrict__ drawn,
                 const int* __restrict__ tokens, const int* __restrict__ cache_rows, const Slot* __restrict__ all_slots,
                 Slot* slots, int4* chosen, int* rows, Draw* guessing, int* guesses, int context, int count) {
    launch_next();
    wait_for_previous(groups, draws, drawn, tokens, cache_rows, all_slots);
    const int group = threadIdx.x;
    if (group >= count) return;
    int index = groups[group].x;
    const int last = index + groups[group].y - 1;
    while (index < last && drawn[index] == tokens[draws[index + 1].row]) ++index;
    Draw draw = draws[index];
    const int place = draw.position - 1;
    const int in_page = TOKENS_OF_A_PAGE - place % TOKENS_OF_A_PAGE, in_context = context - place;
    const int most = drawn[index] < 0 ? 0 : min(GUESSES, min(in_page, in_context));
    chosen[group] = int4{index, place, cache_rows[draw.row], most};
    rows[group] = draw.row;
    guesses[group * (1 + GUESSES)] = index;
    Slot slot = all_slots[draw.slot];
    slot.seen = 0, slot.adjusted = 0, slot.repetition_penalty = 1.0f;
    slots[group] = slot;
    draw.row = draw.slot = group;
    ++draw.position;
    draw.mask = draw.given = draw.likely = -1;
    guessing[group] = draw;
}

extern "C" __global__ void __launch_bounds__(256)
    next_tokens(const int* __restrict__ known, const int* __restrict__ drawn, int* __restrict__ out, int count) {
    launch_next();
    wait_for_previous(known, drawn);
    const int row = blockIdx.x * 256 + threadIdx.x;
    if (row >= count) return;
    const int token = known[row] < 0 ? drawn[-1 - known[row]] : known[row];
    out[row] = max(token, 0);
}

static __device__ __forceinline__ void load_state(const Element8* row, int chunk, float (&values)[8]) {
    unpack(row[chunk], values);
}
static __device__ __forceinline__ void load_state(const float* row, int chunk, float (&values)[8]) {
    load8(row + chunk * 8, values);
}

// A row of `chunks` times eight numbers, normed.
template <typename Number>
static __device__ __forceinline__ void norm_half(const Number* row, const float* weight, Element8* out, int chunks, float eps,
                                                 float* partial) {
    float values[8], gains[8], sum = 0.0f;
    for (int chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
        load_state(row, chunk, values);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = fmaf(values[i], values[i], sum);
    }
    const float scale = 1.0f / sqrtf(block_sum(sum, partial) / static_cast<float>(8 * chunks) + eps);
    for (int chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
        load_state(row, chunk, values);
        load8(weight + chunk * 8, gains);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] *= scale * gains[i];
        out[chunk] = pack(values);
    }
}

// `step`: what a state's row takes of an array of these.
template <typename Number>
static __device__ __forceinline__ void norm_pair(const float* __restrict__ embedded, const float* __restrict__ embedding_norm,
                                                 const Number* __restrict__ states, const float* __restrict__ state_norm,
                                                 Element8* __restrict__ out, int width, float eps, int step) {
    __shared__ float partial[32];
    launch_next();
    wait_for_previous(embedded, states);
    const int64_t row = blockIdx.x;
    const int chunks = width / 8;
    if (blockIdx.y == 0)
        norm_half(embedded + row * width, embedding_norm, out + row * 2 * chunks, chunks, eps, partial);
    else
        norm_half(states + row * step, state_norm, out + (row * 2 + 1) * chunks, chunks, eps, partial);
}

extern "C" __global__ void __launch_bounds__(256)
    pair_rows(const float* embedded, const float* embedding_norm, const Element8* states, const float* state_norm, Element8* out,
              int width, float eps) {
    norm_pair(embedded, embedding_norm, states, state_norm, out, width, eps, width / 8);
}

extern "C" __global__ void __launch_bounds__(256)
    pair_float_rows(const float* embedded, const float* embedding_norm, const float* states, const float* state_norm,
                    Element8* out, int width, float eps) {
    norm_pair(embedded, embedding_norm, states, state_norm, out, width, eps, width);
}

extern "C" __global__ void __launch_bounds__(32)
    go_on(int4* chosen, const int* __restrict__ drawn, int* guesses, int* tokens, int* positions, int* cache_rows, int* contexts,
          int4* pieces, Draw* guessing, int turn, int padding_row, int segment, int count) {
    launch_next();
    wait_for_previous(chosen, drawn, guessing);
    const int group = threadIdx.x;
    if (group >= count) return;
    int4 one = chosen[group];
    const int token = drawn[group];
    if (token < 0) one.w = min(one.w, turn);
    chosen[group] = one;
    guesses[group * (1 + GUESSES) + 1 + turn] = turn < one.w ? token : NO_GUESS;
    tokens[group] = max(token, 0);
    const int further = turn + 1;
    const bool follows = further < one.w;
    const int length = follows ? one.y + further + 1 : 1;
    positions[group] = length - 1;
    cache_rows[group] = follows ? one.z + further : padding_row;
    contexts[group] = length;
    if (segment > 0) pieces[group] = int4{group, (length + segment - 1) / segment << 16, -1, length};
    ++guessing[group].position;
}
