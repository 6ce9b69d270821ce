"""The engine's own loop, planner and cache books on a machine that only takes time."""
