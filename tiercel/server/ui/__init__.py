"""The page at /ui: its static files and the dashboard snapshots that it reads."""
