"""What the engine measures at its start and while it runs: step times, speeds, memory of steps."""
