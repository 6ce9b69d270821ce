"""The runner: from a sealed plan to the arrays of its forwards and to a launched step."""
