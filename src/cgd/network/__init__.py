"""Layer 3, the others: transports, and `Peers`, which drives the protocol over one."""

from cgd.network.driver import Traffic
from cgd.network.local import LocalPeers, local_peers
from cgd.network.peers import Peers, SumSettings

__all__ = ["LocalPeers", "Peers", "SumSettings", "Traffic", "local_peers"]
