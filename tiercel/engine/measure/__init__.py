"""Measurements at the start and while the engine runs: step times, speeds, memory of steps."""
