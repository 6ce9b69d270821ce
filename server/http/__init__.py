"""HTTP itself: the listening socket, bodies, events, clients that go away, and errors as responses."""
