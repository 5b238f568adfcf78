"""Layer 5: simulation of all participants in one process."""

from cgd.extras import require

require("simulate", "the simulator")
