// The gated delta rule (Yang et al. 2024, arXiv:2412.06464) for drawn tokens, one by one, with norms and gates.
//
// Of a token and a value head, with its key head's q and k divided by their lengths (q by sqrt(KEY_DIM), too):
//   S <- exp(g) S;  S <- S + k beta (v - k S);  out = norm(q S) silu(gate)
// where g = decay softplus(alpha + time_step_bias) and beta is a sigmoid. Value head h has the keys of head h % key_heads.
//
// convolved (T, C) float: q, k of all key heads, v of all value heads. x elements (T, stride), gates from column C on, behind them
// beta and alpha of each head, unless `floats` has these (`Controls`). states float (slots, heads, KEY_DIM, VALUE_DIM). out (T, heads
// VALUE_DIM) elements.
//
// Bytes: 8 KEY_DIM VALUE_DIM a head and piece, next to which all else is small: the state is read once and written once, however
// many tokens a piece has. A block holds it in registers, 64 a thread where it is 128 x 128, and the next one comes to shared memory
// meanwhile (`recurrent.cuh`); two blocks a multiprocessor, each takes every so manieth (piece, head). q (S + k u) = q S + (q k) u, so
// that the sums with k and with q are of the same pass, and a token has two meetings of the block.
#include "states/recurrent.cuh"

static constexpr int WARPS = KEY_DIM * VALUE_DIM >= 64 * 64 ? 8 : 4;
using Matrix = HeldMatrix<KEY_DIM, VALUE_DIM, WARPS>;
static constexpr float LEAST_LENGTH = 1e-6f;  // added to squares of lengths

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

extern "C" __global__ void __launch_bounds__(WARPS * 32, 16 / WARPS)
    delta_recurrent(const float* convolved, const Element* x, int stride, const float* floats, int float_stride,
                    const float* time_step_bias, const float* decays, const float* norm, float eps, float* states, PIECES,
                    int count, int heads, int key_heads, Element* out) {
    extern __shared__ __align__(16) unsigned char room[];
    __shared__ __align__(16) float keys[2][KEY_DIM], queries[2][KEY_DIM];
    __shared__ __align__(16) float by_key[Matrix::GROUPS][VALUE_DIM], by_query[Matrix::GROUPS][VALUE_DIM];
    launch_next();
    wait_for_previous(convolved, x, floats, states, rows, lengths, slots, starts);
    const Pieces pieces{rows, lengths, slots, starts};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int all_keys = key_heads * KEY_DIM, all_values = heads * VALUE_DIM, channels = 2 * all_keys + all_values;
    const Controls controls{floats, float_stride, x + channels + all_values, stride};
    Matrix matrix;
    const int column = matrix.column;
    auto state_of = [&](const Piece& piece, int head) {
        return states + (static_cast<int64_t>(piece.slot) * heads + head) * (KEY_DIM * VALUE_DIM);
    };
    Piece next;
    auto ask = [&](int task) {
        if (task >= count * heads) return;
        next = pieces[task / heads];
        if (next.length > 0) matrix.ask(room, state_of(next, task % heads), next.start > 0);
    };
    ask(blockIdx.x);
    int turn = 0;  // of two: others may still read the keys and queries of the token before
    for (int task = blockIdx.x; task < count * heads; task += gridDim.x) {
        const Piece piece = next;
        const int head = task % heads, key_head = head % key_heads;
        if (piece.length > 0) matrix.take(room);
        ask(task + gridDim.x);
        if (piece.length == 0) continue;
        const float bias = time_step_bias[head], decay = decays[head];
        for (int token = 0; token < piece.length; ++token, turn ^= 1) {
            const int row = piece.row + token;
            const float* const qkv = convolved + static_cast<int64_t>(row) * channels;
            float *const q = queries[turn], *const k = keys[turn];
            if (warp == 0) divide_by_length(qkv + key_head * KEY_DIM, 1.0f / sqrtf(static_cast<float>(KEY_DIM)), q);
            if (warp == 1) divide_by_length(qkv + all_keys + key_head * KEY_DIM, 1.0f, k);
            const float4 v = *reinterpret_cast<const float4*>(qkv + 2 * all_keys + head * VALUE_DIM + column);
            const float beta = sigmoid(controls(row, head));
            const float kept = expf(decay * softplus(controls(row, heads + head) + bias));
            __syncthreads();
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
            if (token + 1 == piece.length) matrix.store(state_of(piece, head));
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
    }
}
