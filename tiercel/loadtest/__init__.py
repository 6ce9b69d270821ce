"""The load-test client: many tenants, arrivals, goodput and fairness, against any OpenAI-compatible server."""
