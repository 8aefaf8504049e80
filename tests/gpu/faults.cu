// What a broken kernel of products may do, for tests: each is launched behind one.

// The first numbers of the results become NaN, whether they are floats or elements.
extern "C" __global__ void wrong(unsigned* y) { y[0] = 0xFFFFFFFF; }

extern "C" __global__ void trap(unsigned* y) { asm volatile("trap;"); }

extern "C" __global__ void hang(volatile unsigned* y) {
    while (y[0] != 0x12345678 || y[1] != 0x9ABCDEF0) {
    }
}
