"""Layer 9: experiments with tables and plots as results, and the data sets."""

from cgd.extras import require

require("simulate", "running experiments")
