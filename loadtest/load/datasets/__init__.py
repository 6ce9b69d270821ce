"""What is asked: one file a dataset, each a function of (settings, count, seed) and of nothing else."""
