"""The bodies of requests: types that are the check and the source of /openapi.json, one file for each family."""
