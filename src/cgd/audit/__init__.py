"""Layer 10, the audit: views of coalitions, attacks on them, runs of attacks, and their results."""

from cgd.extras import require

require("audit", "the audit")
