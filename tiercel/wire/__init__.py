"""The frames between processes, and the handshake before them."""
