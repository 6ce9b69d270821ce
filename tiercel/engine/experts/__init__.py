"""Experts of mixtures that are on an SSD, and those of them that are in memory."""
