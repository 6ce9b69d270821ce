"""A simulation: the engine's loop, planner and cache books in virtual time, on a machine that computes nothing."""
