"""Processes that do work which may never end or may crash, so that only the request that caused it is lost."""
