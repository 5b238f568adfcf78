"""Layer 6, federations over a network: the file that all participants hold, the keys each keeps, and joining."""

from cgd.federation.config import Federation, Participant, Training
from cgd.federation.config_edit import new, with_participant, without
from cgd.federation.keys import HubSite, Keys

__all__ = ["Federation", "HubSite", "Keys", "Participant", "Training", "new", "with_participant", "without"]
