"""Decides what each step computes, and for whom. Pure: no torch, no clock of its own, no I/O, no slots."""
