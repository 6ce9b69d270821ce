"""Where every block lives: books of integers and keys. Pure: no torch, no bytes of KV, no I/O outside `store`."""
