"""Engines that a front reaches over TCP: connections, the sequences at each, and what happens when one is lost."""
