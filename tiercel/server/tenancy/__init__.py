"""Tenants: their file, keys, limits and usage, and the admission of requests."""
