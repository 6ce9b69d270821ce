"""The page at /ui: what the daemon does, in pictures, and a place to talk to it."""
