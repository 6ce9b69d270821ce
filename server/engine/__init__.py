"""The engine as the HTTP process sees it: its process, its socket, the sequences it runs, and their generations."""
