"""Layer 5, the whole colony in one process."""
