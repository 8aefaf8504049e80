// The kernels of `rows/` have all else from our own headers.
#include "../../warps/common/basics.cuh"
