"""Several engines: which one serves a request, weights that keep them fair together, and who moves when one ends."""
