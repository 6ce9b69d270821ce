"""Tenants: who they are, which keys they hold, what they may use, and whether a request is admitted."""
