"""Layer 7, what leaks: what a coalition sees, attacks on it, and what follows for those who take part."""
