"""The load: tenants, arrivals, datasets and prompts."""
