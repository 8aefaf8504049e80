// `common/waits.cuh` on the host: named barriers, for threads of a block of which others may have ended.
#pragma once

#include "warps_on_host.h"

#define KERNEL_BEGINS()

namespace host {
static Meeting named[16];
}
inline void named_wait(int barrier, int threads) { host::meet(host::named[barrier], threads); }
inline void named_arrive(int barrier, int threads) { host::come(host::named[barrier], threads); }
inline void late_turn() {}
