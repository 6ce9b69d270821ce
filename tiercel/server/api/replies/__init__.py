"""The bodies of answers: types that are what is sent and the source of /openapi.json, one file for each family."""
