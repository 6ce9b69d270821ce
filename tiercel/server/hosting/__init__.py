"""The host of an engine that serves fronts over TCP."""
