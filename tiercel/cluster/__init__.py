"""Fronts and engines as an application of Ray Serve, which places, restarts and scales them. Tokens bypass Ray."""
