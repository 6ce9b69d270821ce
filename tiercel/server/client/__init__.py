"""The HTTP process's side of the engine: its process, connection, status and sequences, and generations of text."""
