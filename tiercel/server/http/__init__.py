"""HTTP itself: the listening socket, uvicorn, bodies, answers, events, disconnected clients and error responses."""
