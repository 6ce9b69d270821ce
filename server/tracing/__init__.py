"""Traces of requests: the caller's context, the stages of a request as spans, and their way to a collector."""
