"""Layer 5, a federation on disk: the file that all participants hold, and the keys that each keeps for itself."""

from cgd.federation.file import Federation, Participant, Training, new, with_participant, without
from cgd.federation.keys import Keys

__all__ = ["Federation", "Keys", "Participant", "Training", "new", "with_participant", "without"]
