"""Layer 2, what carries the protocol's frames: in one process, over ZeroMQ, through a hub; and what drives it."""
