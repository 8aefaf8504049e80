"""Drawing tokens: the table of slots, masks, and the kernels that read them."""
