"""The bytes of the KV cache: one arena for each tier in memory, the disk, and the threads that copy between them."""
