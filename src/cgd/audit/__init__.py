"""Layer 10, the audit: views of a coalition, attacks on them, runs of attacks, and what came of them."""
