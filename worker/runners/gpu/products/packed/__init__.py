"""Products with weights in GGUF block formats, packed as `cuda/common/packed.cuh` says."""
