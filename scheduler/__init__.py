"""Who computes what in the next step. Pure: no torch, no time of its own, no I/O; it never sees a slot."""
