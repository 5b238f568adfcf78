"""Layer 2, the secure sum: messages, the state machine of one sum, sessions of many. No sockets, clocks or threads."""

from cgd.protocol.messages import Opening, PeerId, Sharing, SumSpec
from cgd.protocol.secure_sum import SecureSum
from cgd.protocol.session import Session

__all__ = ["Opening", "PeerId", "SecureSum", "Session", "Sharing", "SumSpec"]
