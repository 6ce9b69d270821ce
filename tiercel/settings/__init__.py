"""The settings: their declarations, the sources of their values, and what holds between them."""
