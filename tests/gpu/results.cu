// Compares results of products where they lie, for tests: a product of a head has a gigabyte of them.
//
// Options: none. `found` is two 64-bit numbers: how many words are wrong, and the first one's place (begin with 0 and -1).
#include <cuda_fp16.h>

static __device__ void note(bool wrong, long long at, unsigned long long* found) {
    const unsigned mask = __ballot_sync(0xffffffffu, wrong);
    if (mask == 0) return;
    if (threadIdx.x % 32 == 0) atomicAdd(found, static_cast<unsigned long long>(__popc(mask)));
    if (wrong) atomicMin(found + 1, static_cast<unsigned long long>(at));
}

// Every thread of a warp goes through the loop as often as the others: `note` is for all of them.
template <typename Wrong>
static __device__ void look(long long count, unsigned long long* found, Wrong wrong) {
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long first = static_cast<long long>(blockIdx.x) * blockDim.x; first < count; first += step) {
        const long long at = first + threadIdx.x;
        note(at < count && wrong(at), at, found);
    }
}

extern "C" __global__ void other_bits(const unsigned* a, const unsigned* b, long long count, unsigned long long* found) {
    look(count, found, [&](long long at) { return a[at] != b[at]; });
}

extern "C" __global__ void unlike(const unsigned* a, unsigned value, long long count, unsigned long long* found) {
    look(count, found, [&](long long at) { return a[at] != value; });
}

// Where a is not within `absolute` + `relative` |b| of b; NaN never is.
static __device__ bool far(float a, float b, float absolute, float relative) {
    return !(a == b || fabsf(a - b) <= absolute + relative * fabsf(b));
}

extern "C" __global__ void far_floats(const float* a, const float* b, long long count, float absolute, float relative,
                                      unsigned long long* found) {
    look(count, found, [&](long long at) { return far(a[at], b[at], absolute, relative); });
}

extern "C" __global__ void far_halves(const __half* a, const __half* b, long long count, float absolute, float relative,
                                      unsigned long long* found) {
    look(count, found, [&](long long at) { return far(__half2float(a[at]), __half2float(b[at]), absolute, relative); });
}
