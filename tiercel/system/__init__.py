"""Services of the operating system to a process: files, streams, limits, threads, logs."""
