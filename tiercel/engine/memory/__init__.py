"""The memory of one engine: how many blocks fit into each tier, and the tiers themselves."""
