// `common/waits.cuh` on the host: named barriers, for threads of a block of which others may have ended.
#pragma once

#include "warps_on_host.h"

#define KERNEL_BEGINS()

namespace host {
static Meeting of_named[16];
}
inline void named_wait(int barrier, int everyone) { host::meet(host::of_named[barrier], everyone); }
