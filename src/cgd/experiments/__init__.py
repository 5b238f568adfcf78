"""Layer 7, runs that end in tables and plots."""
