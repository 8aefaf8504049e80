// The gated delta rule (Yang et al. 2024, arXiv:2412.06464) for drawn tokens, one by one, with norms and gates.
//
// Of a token and a value head, with its key head's q and k divided by their lengths (q by sqrt(KEY_DIM), too):
//   S <- exp(g) S;  S <- S + k beta (v - k S);  out = norm(q S) silu(gate)
// where g = decay softplus(alpha + time_step_bias) and beta is a sigmoid. Whose keys a value head has says `DeltaHeads`.
//
// convolved (T, C) float: q, k of all key heads, v of all value heads. x elements (T, stride), gates from column C on, behind them beta
// and alpha of each head, unless `floats` has these (`Controls`). states float (slots, heads, KEY_DIM, VALUE_DIM). out (T, heads
// VALUE_DIM) elements.
//
// delta_recurrent_fused convolves columns of x itself, with the inputs and the weight of `convolution.cu`, and leaves `convolved` alone:
// its blocks take all value heads of a key head, so that nobody else reads or writes the inputs of these. It is for pieces enough, or
// as many key heads as value heads. The bits are the same.
//
// Bytes: 8 KEY_DIM VALUE_DIM a head and piece, next to which all else is small: the state is read once and written once, however
// many tokens a piece has. A block holds it in registers, 64 a thread where it is 128 x 128, and the next one comes to shared memory
// meanwhile (`recurrent.cuh`); two blocks a multiprocessor, each takes every so manieth (piece, head). q (S + k u) = q S + (q k) u, so
// that the sums with k and with q are of the same pass, and a token has two meetings of the block.
#include "states/delta_heads.cuh"
#include "states/recurrent.cuh"

static constexpr int WARPS = KEY_DIM * VALUE_DIM >= 64 * 64 ? 8 : 4;
using Matrix = HeldMatrix<KEY_DIM, VALUE_DIM, WARPS>;
static constexpr float LEAST_LENGTH = 1e-6f;  // added to squares of lengths

static constexpr int KEPT = TAPS - 1;

// A row of KEY_DIM floats over its length, by a warp.
static __device__ __forceinline__ void divide_by_length(const float* source, float scale, float* target) {
    constexpr int EACH = KEY_DIM / 32;
    const int lane = threadIdx.x % 32;
    float values[EACH], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        values[i] = source[i * 32 + lane];
        squares = __fmaf_rn(values[i], values[i], squares);
    }
    const float factor = scale / sqrtf(warp_sum(squares) + LEAST_LENGTH);
#pragma unroll
    for (int i = 0; i < EACH; ++i) target[i * 32 + lane] = values[i] * factor;
}

// Queries, keys and values of a token, of which a warp has each, where they are convolved here: the inputs before it, and the results.
struct Convolved {
    static constexpr int WIDEST = KEY_DIM > VALUE_DIM ? KEY_DIM : VALUE_DIM, EACH = WIDEST / 32;

    float before[3][KEPT][WIDEST];  // a ring: the oldest at `token % KEPT`; a lane has every 32nd channel
    float taps[3][TAPS][WIDEST];

    // What the state holds, and the weight; all of it is asked for at once.
    __device__ __forceinline__ void load(int which, int size, const float* inputs, const float* weight, int channels, bool present) {
        float given[EACH][KEPT], of_channel[EACH][TAPS];
        each(size, [&](int i, int at) {
#pragma unroll
            for (int j = 0; j < KEPT; ++j) given[i][j] = present ? inputs[static_cast<int64_t>(j) * channels + at] : 0.0f;
#pragma unroll
            for (int tap = 0; tap < TAPS; ++tap) of_channel[i][tap] = weight[at * TAPS + tap];
        });
        each(size, [&](int i, int at) {
#pragma unroll
            for (int j = 0; j < KEPT; ++j) before[which][j][at] = given[i][j];
#pragma unroll
            for (int tap = 0; tap < TAPS; ++tap) taps[which][tap][at] = of_channel[i][tap];
        });
    }
    __device__ __forceinline__ void store(int which, int size, float* inputs, int channels, int length) const {
        each(size, [&](int, int at) {
#pragma unroll
            for (int i = 0; i < KEPT; ++i) inputs[static_cast<int64_t>(i) * channels + at] = before[which][(length + i) % KEPT][at];
        });
    }
    // With the bits of `convolution.cu`.
    __device__ __forceinline__ void next(int which, int size, const Element* x, int token, float* target) {
        float input[EACH];
        each(size, [&](int i, int at) { input[i] = to_float(x[at]); });
        each(size, [&](int i, int at) {
            float sum = __fmul_rn(before[which][token % KEPT][at], taps[which][0][at]);
#pragma unroll
            for (int tap = 1; tap < KEPT; ++tap)
                sum = __fmaf_rn(before[which][(token + tap) % KEPT][at], taps[which][tap][at], sum);
            before[which][token % KEPT][at] = input[i];
            target[at] = silu(__fmaf_rn(input[i], taps[which][KEPT][at], sum));
        });
    }

private:
    template <typename Take>
    static __device__ __forceinline__ void each(int size, Take take) {
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (static_cast<int>(i * 32 + threadIdx.x % 32) < size) take(i, static_cast<int>(i * 32 + threadIdx.x % 32));
    }
};

// FUSED: a task is a piece and a key head with its value heads, which nobody else has, so that what they are made of is convolved here;
// else a piece and a value head, and `convolved` has it.
template <bool FUSED>
static __device__ __forceinline__ void run(unsigned char* room, const float* convolved, const Element* x, int stride, float* inputs,
                                           const float* weight, const Controls& controls, const float* time_step_bias,
                                           const float* decays, const float* norm, float eps, float* states, const Pieces& pieces,
                                           int count, int heads, int key_heads, Element* out) {
    __shared__ __align__(16) float keys[2][KEY_DIM], queries[2][KEY_DIM], all_v[2][FUSED ? VALUE_DIM : 4];
    __shared__ __align__(16) float by_key[Matrix::GROUPS][VALUE_DIM], by_query[Matrix::GROUPS][VALUE_DIM];
    __shared__ Convolved made;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int all_keys = key_heads * KEY_DIM, all_values = heads * VALUE_DIM, channels = 2 * all_keys + all_values;
    Matrix matrix;
    const int column = matrix.column;
    auto state_of = [&](const Piece& piece, int head) {
        return states + (static_cast<int64_t>(piece.slot) * heads + head) * (KEY_DIM * VALUE_DIM);
    };
    const DeltaHeads all{heads, key_heads};
    const int of_piece = FUSED ? key_heads : heads, tasks = count * of_piece;
    auto first_head = [&](int task) { return FUSED ? all.first_of(task % of_piece) : task % of_piece; };
    auto piece_of = [&](int task) { return task < tasks ? pieces[task / of_piece] : Piece{0, 0, 0, 0}; };
    auto ask = [&](const Piece& piece, int head) {
        if (piece.length > 0) matrix.ask(room, state_of(piece, head), piece.start > 0);
    };
    int task = blockIdx.x, head = first_head(task), turn = 0;  // turn: others may still read what is of the token before
    Piece piece = piece_of(task);
    ask(piece, head);
    while (task < tasks) {
        const bool last_of_piece = !FUSED || all.is_last(head);
        const int next_task = last_of_piece ? task + static_cast<int>(gridDim.x) : task;
        const int next_head = last_of_piece ? first_head(next_task) : all.after(head);
        const Piece next = last_of_piece ? piece_of(next_task) : piece;
        if (piece.length == 0) ask(next, next_head);
        const int key_head = all.key_of(head);
        const float bias = time_step_bias[head], decay = decays[head];
        // Where this warp's vector begins, of queries, keys and values.
        const int first = warp == 0 ? key_head * KEY_DIM : warp == 1 ? all_keys + key_head * KEY_DIM : 2 * all_keys + head * VALUE_DIM;
        const int size = warp < 2 ? KEY_DIM : VALUE_DIM;
        float* const before = inputs + static_cast<int64_t>(piece.slot) * KEPT * channels + first;
        if (FUSED && warp < 3 && piece.length > 0)
            made.load(warp, size, before, weight + static_cast<int64_t>(first) * TAPS, channels, piece.start > 0);
        for (int token = 0; token < piece.length; ++token, turn ^= 1) {
            const int row = piece.row + token;
            float *const q = queries[turn], *const k = keys[turn];
            float4 v;
            if (FUSED) {
                if (warp < 3)
                    made.next(warp, size, x + static_cast<int64_t>(row) * stride + first, token,
                              warp == 0 ? q : warp == 1 ? k : all_v[turn]);
                if (warp == 0) divide_by_length(q, 1.0f / sqrtf(static_cast<float>(KEY_DIM)), q);
                if (warp == 1) divide_by_length(k, 1.0f, k);
            } else {
                const float* const qkv = convolved + static_cast<int64_t>(row) * channels;
                if (warp == 0) divide_by_length(qkv + key_head * KEY_DIM, 1.0f / sqrtf(static_cast<float>(KEY_DIM)), q);
                if (warp == 1) divide_by_length(qkv + all_keys + key_head * KEY_DIM, 1.0f, k);
                v = *reinterpret_cast<const float4*>(qkv + 2 * all_keys + head * VALUE_DIM + column);
            }
            const float beta = sigmoid(controls(row, head));
            const float kept = expf(decay * softplus(controls(row, heads + head) + bias));
            if (token == 0) {  // only now: what is small was asked for before the block waits for the matrix
                matrix.take(room);
                ask(next, next_head);
            }
            __syncthreads();
            if (FUSED) v = *reinterpret_cast<const float4*>(all_v[turn] + column);
            float4 with_key = make_float4(0.0f, 0.0f, 0.0f, 0.0f), with_query = with_key;
#pragma unroll
            for (int i = 0; i < Matrix::HELD; ++i) {
                scale_by(matrix.held[i], kept);
                add_scaled(with_key, k[matrix.row(i)], matrix.held[i]);
                add_scaled(with_query, q[matrix.row(i)], matrix.held[i]);
            }
            matrix.put(by_key, with_key);
            matrix.put(by_query, with_query);
            __syncthreads();
            const float4 known = matrix.total(by_key);
            const float4 change = make_float4((v.x - known.x) * beta, (v.y - known.y) * beta, (v.z - known.z) * beta,
                                              (v.w - known.w) * beta);
#pragma unroll
            for (int i = 0; i < Matrix::HELD; ++i) add_scaled(matrix.held[i], k[matrix.row(i)], change);
            if (token + 1 == piece.length) {
                matrix.store(state_of(piece, head));
                // Keys and queries are convolved for each value head: their inputs stay until the last one.
                if (FUSED && (warp == 2 || (warp < 2 && last_of_piece))) made.store(warp, size, before, channels, piece.length);
            }
            if (warp != 0) continue;
            float alike = 0.0f;
#pragma unroll
            for (int i = 0; i < KEY_DIM / 32; ++i) alike = __fmaf_rn(q[i * 32 + lane], k[i * 32 + lane], alike);
            float4 mixed = matrix.total(by_query);
            add_scaled(mixed, warp_sum(alike), change);
            const float squares = mixed.x * mixed.x + mixed.y * mixed.y + mixed.z * mixed.z + mixed.w * mixed.w;
            const float mean = warp_sum(lane < Matrix::LANES ? squares : 0.0f) / static_cast<float>(VALUE_DIM);
            if (lane >= Matrix::LANES) continue;
            scale_by(mixed, 1.0f / sqrtf(mean + eps));
            const float4 gains = *reinterpret_cast<const float4*>(norm + column);
            const int64_t place = head * VALUE_DIM + column;
            const Element* const gates = x + static_cast<int64_t>(row) * stride + channels + place;
            const float2 low = to_floats(reinterpret_cast<const Element2*>(gates)[0]);
            const float2 high = to_floats(reinterpret_cast<const Element2*>(gates)[1]);
            uint2 packed;
            packed.x = pack(mixed.x * gains.x * silu(low.x), mixed.y * gains.y * silu(low.y));
            packed.y = pack(mixed.z * gains.z * silu(high.x), mixed.w * gains.w * silu(high.y));
            *reinterpret_cast<uint2*>(out + static_cast<int64_t>(row) * all_values + place) = packed;
        }
        task = next_task, head = next_head, piece = next;
    }
}

#define RECURRENT_KERNEL(NAME, FUSED)                                                                                   \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 16 / WARPS)                                                \
        NAME(const float* convolved, const Element* x, int stride, float* inputs, const float* weight,                  \
             const float* floats, int float_stride, const float* time_step_bias, const float* decays,                   \
             const float* norm, float eps, float* states, PIECES, int count, int heads, int key_heads, Element* out) {  \
        extern __shared__ __align__(16) unsigned char room[];                                                           \
        launch_next();                                                                                                  \
        wait_for_previous(convolved, x, inputs, floats, states, rows, lengths, slots, starts);                          \
        const Element* const steering = x + (2 * key_heads * KEY_DIM + 2 * heads * VALUE_DIM);                          \
        run<FUSED>(room, convolved, x, stride, inputs, weight, {floats, float_stride, steering, stride},                \
                   time_step_bias, decays, norm, eps, states, {rows, lengths, slots, starts}, count, heads, key_heads,  \
                   out);                                                                                                \
    }

RECURRENT_KERNEL(delta_recurrent, false)
RECURRENT_KERNEL(delta_recurrent_fused, true)
