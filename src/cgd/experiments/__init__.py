"""Layer 9, runs that end in tables and plots."""
