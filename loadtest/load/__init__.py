"""What is sent: tenants, arrivals, datasets and prompts."""
