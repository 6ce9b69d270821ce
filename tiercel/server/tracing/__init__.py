"""Records of requests, and traces: the caller's context, the stages of a request as spans, and their export."""
