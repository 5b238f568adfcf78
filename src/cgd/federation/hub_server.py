"""The hub of a federation: `cgd hub`. It needs the federation file and the hub's own key, and nothing else."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from cgd.errors import InputError
from cgd.federation.config import Federation
from cgd.federation.keys import Keys, find_key
from cgd.files import stamp
from cgd.transport.addresses import listening_address
from cgd.transport.hub import Hub

if TYPE_CHECKING:
    import os

    from cgd.transport.hub import Record

log = logging.getLogger("cgd.federation")

WATCH_SECONDS = 1.0


class FederationHub:
    """A running hub, and its eye on the file.

    Args:
        path: the federation file.
        key: the hub's private key file; `hub.key` beside the federation file or here if not given.
        listen: where to bind, such as `tcp://0.0.0.0:7000`, if not at the port of the hub's address.
        record: told of everything that the hub ever sees or sends; see `Hub`.

    Raises:
        InputError: the file names no hub, or it or the key cannot be used.
        TransportError: the port is in use.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        key: str | os.PathLike[str] | None = None,
        listen: str | None = None,
        record: Record | None = None,
    ) -> None:
        self.path = Path(path)
        self.federation = Federation.load(self.path)
        site = self.federation.hub
        if site is None:
            raise InputError(f"{self.path} names no hub; add a [hub] with its address and key, at every participant")
        keys = Keys.load(key or find_key(self.path, "hub"))
        if keys.public != site.key:
            raise InputError(
                f"the key file's public key is {keys.public}, and {self.path} lists another for the hub; use the right "
                "key file, or have the new key listed"
            )
        self.hub = Hub(
            self.federation.contacts,
            self.federation.groups(),
            keys.secret,
            listen or listening_address(site.address),
            record,
        )
        self._stop = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="cgd-file-hub", daemon=True)
        self._watching.start()

    def close(self) -> None:
        """Stop; a second call does nothing."""
        self._stop.set()
        self._watching.join()
        self.hub.close()

    def _watch(self) -> None:
        """Follow the federation file."""
        seen = None
        while not self._stop.wait(WATCH_SECONDS):
            found = stamp(self.path)
            if found == seen:
                continue
            seen = found
            try:
                self._take_over(Federation.load(self.path))
            except InputError as error:
                log.warning("the federation file has changed and is not used: %s", error, extra={"event": "file"})

    def _take_over(self, new: Federation) -> None:
        before = self.federation
        if new.digest == before.digest:
            return
        if new.name != before.name or new.epoch <= before.epoch:
            raise InputError(
                f"it is {new.name!r}, epoch {new.epoch}, and we are in {before.name!r}, epoch {before.epoch}; raise "
                "its epoch, or start the hub again"
            )
        if new.hub != before.hub:
            raise InputError("its [hub] is another one; start the hub again if that is meant")
        self.federation = new
        self.hub.update(new.contacts, new.groups())
        names = ", ".join(new.names)
        log.info("epoch %d: %s", new.epoch, names, extra={"event": "epoch", "epoch": new.epoch})
