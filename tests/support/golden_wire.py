"""Bytes of fixed content that participants send or store; for `support.golden`.

The labels, and the texts that the content is derived from, are in golden.json and so keep their old names.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

import cgd
from cgd.federation import config_edit
from cgd.federation.config import Federation
from cgd.federation.keys import curve_key
from cgd.federation.participants import HubSite, Participant
from cgd.federation.state import entry_header
from cgd.optim.displacement import AdamRule, SGDRule
from cgd.optim.recovery import TensorWriter, common_state
from cgd.optim.sample_count import _commitment
from cgd.secagg import messages as protocol
from cgd.secagg.certificates import PendingReveal, Terms
from cgd.secagg.codec import KINDS, Frame, to_bytes
from cgd.secagg.journal import Journal
from cgd.secagg.journal_entry import Step
from cgd.secagg.key_agreement import EphemeralKey, MembershipView, derive_group_key, derive_pair_keys
from cgd.secagg.mac import LinearMac
from cgd.secagg.masking import PairwiseMasks, add_self_mask
from cgd.secagg.positions import GroupPosition, PositionReport, StateSummary, digest_of_reports
from cgd.secagg.statements import slot_of, statement
from cgd.transport.channel import ChannelFactory
from cgd.transport.link import Datagram, DatagramKind
from support.histories import append_certified
from support.identities import identity, public_keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.federation.keys import Keys
    from cgd.optim.displacement import UpdateRule
    from cgd.secagg.federation_spec import FederationSpec
    from cgd.secagg.messages import Message

MEMBERS = ("ada", "bob", "cleo")
SPEC = protocol.SumSpec((2, 3), "float32", 32, 20, "pairwise", "mesh", "", "a context, é", True)
OTHER_SPEC = protocol.SumSpec((5,), "int64", 64, 0, "uniform", "aggregator", "bob")
SCHEMA = """
[data]
target = "outcome"
classes = ["well", "ill"]
[data.columns]
age = "number"
ward = ["north", "south"]
[model]
kind = "mlp"
layers = [8, 4]
activation = "tanh"
"""


def made(label: str, size: int = 32) -> bytes:
    """Make bytes that depend only on the label."""
    return b"".join(sha256(f"{label} {block}".encode()).digest() for block in range(-(-size // 32)))[:size]


def wire(fixed_keys: Callable[[str], Keys]) -> dict[str, str]:
    """Return the digests of all bytes of fixed content; `fixed_keys` returns the keys of a participant."""
    parts = messages() | journals() | secrets() | states() | federations(fixed_keys)
    return {name: sha256(content).hexdigest() for name, content in parts.items()}


def messages() -> dict[str, bytes]:
    """Encode a frame of every kind, by its number on the wire, and a datagram of every kind."""
    signature, tag = made("signature", 64), made("tag", 16)
    position = GroupPosition(
        3, made("head"), made("mark"), made("commitment"), (StateSummary(0, 3, 80, True, made("state")),)
    )
    report = PositionReport(
        made("view"), 1, {"everyone": position, "column-0": GroupPosition(0, made("head"), None, made("other"))}
    )
    terms = Terms(2, 7, made("head"), 5, (0, 6), made("kept")).to_bytes()
    examples: dict[str, Message] = {
        "ready": protocol.Ready(SPEC, made("seal"), terms, signature),
        "share": protocol.Share(3, made("words", 24)),
        "subtotal": protocol.Subtotal(6, made("words", 24)),
        "total": protocol.Total(9, made("words", 24)),
        "confirm": protocol.Confirm(made("digest"), signature),
        "unseal": protocol.RevealKey(made("key", 16)),
        "abort": protocol.Abort(protocol.Reason.RANGE),
        "leave": protocol.Leave(),
        "hello": protocol.Hello(
            made("ours"), made("yours"), "1.0", "trial", 2, (("training", "ab"), ("é", "c")), signature
        ),
        "standing": protocol.JournalPosition(
            report.to_bytes(), signature, tag, (("everyone", made("part")),), (("bob", made("key"), signature),)
        ),
        "ask": protocol.JournalRequest("everyone", 4, False),
        "piece": protocol.JournalChunk(2, "everyone", 30, made("words", 24)),
        "farewell": protocol.Goodbye(True, (("everyone", 7, made("end")),)),
        "deposit": protocol.Deposit(4, "everyone", 64, made("words", 24)),
        "again": protocol.ResendRequest(),
        "seen": protocol.SignedEvidence("ready", made("slot"), (("ada", made("said"), signature),)),
        "gathered": protocol.PositionsGathered(made("all")),
        "key share": protocol.KeyShare(made("part", 17)),
        "attendance": protocol.Attendance(9, MEMBERS, made("processes"), ("dan",), begun=True),
        "complete sum": protocol.CompleteSum("everyone", b'["a sum"]'),
    }
    assert len({type(each) for each in examples.values()}) == len(KINDS)
    frames = {name: to_bytes(Frame(made("session", 16), 7, message)) for name, message in examples.items()}
    named = {f"frame {content[4]:02} {name}": content for name, content in frames.items()}
    named["frame of another ready"] = to_bytes(Frame(made("session", 16), 8, protocol.Ready(OTHER_SPEC, made("seal"))))
    named["every reason"] = b"".join(
        to_bytes(Frame(bytes(16), 1, protocol.Abort(reason))) for reason in sorted(protocol.Reason)
    )
    named["every datagram"] = b"".join(
        Datagram(kind, made("sender", 8), made("recipient", 8), 5, b"body").to_bytes() for kind in sorted(DatagramKind)
    )
    named["reports"] = digest_of_reports({name: report.to_bytes() for name in MEMBERS})
    return named


def journals() -> dict[str, bytes]:
    """Encode a journal with three sums, states and a pending reveal: whole, as a transfer, and as records."""
    journal = Journal()
    for number, step in enumerate((None, Step(0, 0), Step(0, 1))):
        words = np.frombuffer(made(f"total {number}", 4 * SPEC.size), dtype="<u4").copy()
        append_certified(journal, SPEC, words, MEMBERS, epoch=2, step=step)
        if step is not None:
            journal.save_state(0, step.number + 1, b"a state")
    journal.save_state(1, 1, b"a fixed state", fixed=True)
    journal.pending_reveal = PendingReveal(3, MEMBERS, made("opening"))
    return {
        "ledger": journal.to_bytes(),
        "ledger, given away": journal.export_since(1, states=True),
        "ledger, an entry": entry_header(2, journal.entry_record(2)) + b"".join(map(bytes, journal.entry_record(2))),
        "ledger, a mark": b"".join(map(bytes, journal.pending_reveal_record())),
        "ledger, its ends": journal.head + journal.fixed_states_digest() + journal.final_digest(),
    }


def secrets() -> dict[str, bytes]:
    """Derive masks, MAC tags and signatures from fixed keys."""
    masks = PairwiseMasks("bob", {"ada": made("one", 16), "cleo": made("other", 16)}, made("session", 16))
    words, wide = np.arange(100, dtype=np.uint32), np.arange(100, dtype=np.uint64)
    masks.add_to(words, 3)
    masks.add_to(wide, 4)
    self_masked = np.arange(100, dtype=np.uint32)
    add_self_mask(self_masked, made("seal", 16))
    mac = LinearMac(made("tags", 16), 5, MEMBERS)
    signed = statement("confirm", slot_of(made("view"), "everyone", 3), made("content"))
    return {
        "expanded shares": words.tobytes() + wide.tobytes(),
        "seal": self_masked.tobytes(),
        "tags": mac.tags("bob", words).tobytes() + mac.tags("ada", wide).tobytes(),
        "statement": signed + identity("ada").sign(signed),
        "common key": derive_group_key({name: made(name) for name in MEMBERS}, made("session", 16)),
        "pledge": _commitment(made("seed"), 24, 2, b"").to_bytes(8, "little"),
        "participant's seed": cgd.participant_seed(3, cgd.Cell(1, 2)),
    }


def states() -> dict[str, bytes]:
    """Encode the states that optimisers store, and an origin file."""
    encoded = {}
    rules: dict[str, UpdateRule] = {"momentum": SGDRule(0.5, 0.5), "adam": AdamRule(0.5)}
    for name, rule in rules.items():
        parameter = torch.arange(6.0).reshape(2, 3)
        state = {"origin": torch.ones(2, 3), "displacement": torch.zeros(2, 3)}
        for _ in range(2):
            rule.move(state["displacement"], parameter, state)
        encoded[f"state of {name}"] = TensorWriter().to_bytes(
            common_state([parameter], {parameter: state}, [24, 1, 7, 8])
        )
    model = torch.nn.Linear(40, 30)
    origin = cgd.confine(model, 0.25, made("seed"), start="zeros")
    with tempfile.TemporaryDirectory() as folder:
        origin.save(Path(folder) / "origin.json")
        encoded["origin file"] = (Path(folder) / "origin.json").read_bytes()
    encoded["origin"] = model.weight.detach().numpy().tobytes() + model.bias.detach().numpy().tobytes()
    return encoded


def federations(fixed_keys: Callable[[str], Keys]) -> dict[str, bytes]:
    """Write a federation file and keys, and the digests that its members compare."""
    keys = {name: fixed_keys(name) for name in MEMBERS}
    hub = HubSite("tcp://hub.example:7000", fixed_keys("hub").public)
    participants = [
        Participant(name, f"tcp://{name}.example:7001", keys[name].public, cgd.Cell(row, 0))
        for row, name in enumerate(MEMBERS)
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        private, public = keys["ada"].save(folder)
        full = config_edit.create_federation(folder / "full.toml", "trial", participants, None, hub, SCHEMA)
        parts = {
            "key file": private.read_bytes() + public.read_bytes(),
            # The digest is of a file with the old name of a key that was renamed since.
            "federation file": (folder / "full.toml")
            .read_bytes()
            .replace(b'masking = "pairwise"', b'sharing = "expanded"'),
        }
    plain = [f'[[participants]]\nname = "{p.name}"\naddress = "{p.address}"\nkey = "{p.key}"\n' for p in participants]
    short = Federation.parse('name = "short"\nepoch = 3\n' + "".join(plain), Path("short.toml"))
    for which, federation in (("full", full), ("short", short)):
        for section, digest in sorted(federation.sections().items()):
            parts[f"{which} federation [{section}]"] = digest.encode()
        parts[f"{which} federation"] = f"{federation.digest} {federation.settings.bound!r}".encode()
        parts[f"{which} federation, groups"] = repr(sorted(federation.groups().items())).encode()
    parts["seed for a federation"] = keys["ada"].federation_seed("trial")
    channels = ChannelFactory("ada", keys["ada"].secret, {name: curve_key(each.public) for name, each in keys.items()})
    parts["fingerprint of a relayed pair"] = channels.fingerprint("ada", "bob")
    return parts | views(full.federation_spec("1.0"))


def views(federation_spec: FederationSpec) -> dict[str, bytes]:
    """Return the digest of a view, and the keys of a pair of its members."""
    ephemerals = {}
    for name in MEMBERS:
        ephemerals[name] = EphemeralKey()
        ephemerals[name].private = X25519PrivateKey.from_private_bytes(made(f"ephemeral {name}"))
        ephemerals[name].public = ephemerals[name].private.public_key().public_bytes_raw()
    federation_spec = replace(federation_spec, keys=public_keys(MEMBERS))
    view = MembershipView.of(federation_spec, {name: each.public for name, each in ephemerals.items()})
    one = derive_pair_keys("ada", identity("ada"), ephemerals["ada"], "bob", federation_spec, view)
    other = derive_pair_keys("bob", identity("bob"), ephemerals["bob"], "ada", federation_spec, view)
    assert (one.mask_key, one.own_tag, one.peer_tag) == (other.mask_key, other.peer_tag, other.own_tag)
    return {"view": view.digest, "keys of a pair": one.mask_key + one.own_tag + one.peer_tag}
