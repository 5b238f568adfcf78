"""Layer 2: transports for the protocol's frames (in one process, over ZeroMQ, through a hub) and their drivers."""
