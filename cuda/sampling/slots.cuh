// The records that host and kernels share. Their members are written once, as NumPy dtypes, and come from there as macros
// (`members` in worker/runners/gpu/device/sources.py): SLOT in worker/runners/gpu/sampling/sampler.py, what is known of
// a running sequence, and DRAW in worker/runners/base.py, a token that a step draws.
#pragma once

struct Slot {
    SLOT_MEMBERS
};

struct Draw {
    DRAW_MEMBERS
};
