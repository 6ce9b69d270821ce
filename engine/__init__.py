"""The engine puts the books (scheduler, kvcache) and the machines (device, models) together."""
