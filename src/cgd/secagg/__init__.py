"""Layer 1: secure aggregation without I/O.

It contains ring arithmetic, secret sharing, masking, MACs and key agreement; the messages and their bytes; the state
machines of one sum, of a session and of a federation's membership; and the journal of finished sums.
"""

from cgd.secagg.messages import Masking, Opening, PeerId, SumSpec
from cgd.secagg.secure_sum import SecureSum
from cgd.secagg.session import Session

__all__ = ["Masking", "Opening", "PeerId", "SecureSum", "Session", "SumSpec"]
