"""Layer 5: simulation of all participants in one process, or on a cluster."""

from cgd.extras import require

require("simulate", "the simulator")
