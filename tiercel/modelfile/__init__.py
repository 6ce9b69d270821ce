"""Models in one file (GGUF): where their metadata and tensors are."""
