// The table of slots: sequences that take one, and tokens that the host does not know yet.
//
//   admit          slots[places[i]] = rows[i] for i < count; a place that is there twice has the same row twice
//   gather_tokens  out[i] = tokens[i], or where that is negative the token last drawn in slot slot_of_token[i]; and
//                  history[cache_rows[i]] = out[i], so that the KV cache says of which tokens it is
//
// Slots are 72 bytes; a thread takes one. Both are a few microseconds, of which most is the launch.
#include "common/basics.cuh"
#include "sampling/slots.cuh"

extern "C" __global__ void __launch_bounds__(256)
    admit(const Slot* __restrict__ rows, const int* __restrict__ places, Slot* slots, int count) {
    launch_next();
    wait_for_previous(rows, places);
    const int index = blockIdx.x * 256 + threadIdx.x;
    if (index < count) slots[places[index]] = rows[index];
}

extern "C" __global__ void __launch_bounds__(256)
    gather_tokens(const int* __restrict__ tokens, const int* __restrict__ slot_of_token,
                  const Slot* __restrict__ slots, const int* __restrict__ cache_rows, int* __restrict__ history,
                  int* __restrict__ out, int count) {
    launch_next();
    wait_for_previous(slots);
    const int index = blockIdx.x * 256 + threadIdx.x;
    if (index >= count) return;
    int token = tokens[index];
    if (token < 0) {
        const int slot = slot_of_token[index];
        token = slot >= 0 ? slots[slot].last_token : 0;
    }
    out[index] = token;
    const int row = cache_rows[index];
    if (row >= 0) history[row] = token;
}
