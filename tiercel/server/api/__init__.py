"""The HTTP API: what clients may send (schemas), what they get (replies), the routes, and how a request is served."""
