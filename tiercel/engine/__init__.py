"""The engine process: the loop that connects the books (scheduler, kvcache) with the machine (device, models)."""
