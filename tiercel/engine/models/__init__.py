"""Models: what runs a Hugging Face folder on paged attention."""
