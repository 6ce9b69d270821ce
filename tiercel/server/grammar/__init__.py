"""Grammars that outputs must follow: how they are built from the fields of requests, and checked before any token."""
