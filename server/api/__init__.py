"""The HTTP API: routes, schemas, prompts, replies and streams."""
