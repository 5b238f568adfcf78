"""Layer 6, federations over a network: the federation file, keys, joining, the hub server and the state folder."""

from cgd.federation.config import Federation, Training
from cgd.federation.config_edit import add_participant, create_federation, remove_participant
from cgd.federation.keys import Keys
from cgd.federation.participants import HubSite, Participant

__all__ = [
    "Federation",
    "HubSite",
    "Keys",
    "Participant",
    "Training",
    "add_participant",
    "create_federation",
    "remove_participant",
]
