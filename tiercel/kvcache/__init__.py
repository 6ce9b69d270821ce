"""The books of the KV cache: which block is in which slot of which tier. No torch, KV bytes or I/O outside `store`."""
