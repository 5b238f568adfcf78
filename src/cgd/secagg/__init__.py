"""Layer 1, secure aggregation without I/O: ring arithmetic, masks, messages, state machines, journals."""

from cgd.secagg.messages import Opening, PeerId, Sharing, SumSpec
from cgd.secagg.secure_sum import SecureSum
from cgd.secagg.session import Session

__all__ = ["Opening", "PeerId", "SecureSum", "Session", "Sharing", "SumSpec"]
