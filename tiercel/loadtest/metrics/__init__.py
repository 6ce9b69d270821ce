"""The server's /metrics page: read, parsed and made into series."""
