"""The bytes of KV: one arena per tier."""
