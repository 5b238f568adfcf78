"""The hub server of a federation (`cgd hub`); it needs the federation file and the hub's key, and nothing else."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from cgd.errors import CGDError, InputError
from cgd.federation.config import Federation
from cgd.federation.keys import Keys, find_key
from cgd.files import watch
from cgd.transport.addresses import listening_address
from cgd.transport.hub import Hub

if TYPE_CHECKING:
    import os

    from cgd.transport.hub import MessageRecorder

log = logging.getLogger("cgd.federation")

WATCH_SECONDS = 1.0


class FederationHub:
    """Run a hub, and reload the federation file when it changes.

    Args:
        path: the federation file.
        key: the hub's private key file; by default `hub.key` next to the federation file or in this folder.
        listen: the address to bind, such as `tcp://0.0.0.0:7000`; by default the port of the hub's address.
        record: called with everything that the hub receives or sends; see `Hub`.

    Raises:
        InputError: the file names no hub, or the file or the key cannot be used.
        TransportError: the port is in use.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        key: str | os.PathLike[str] | None = None,
        listen: str | None = None,
        record: MessageRecorder | None = None,
    ) -> None:
        self.path = Path(path)
        self.federation = Federation.load(self.path)
        site = self.federation.hub
        if site is None:
            raise InputError(
                f"{self.path} names no hub; add a [hub] with its address and key to every participant's file"
            )
        keys = Keys.load(key or find_key(self.path, "hub"))
        if keys.public != site.key:
            raise InputError(
                f"the key file's public key is {keys.public}, and {self.path} lists another for the hub; use the right "
                "key file, or list the new key"
            )
        self.hub = Hub(
            self.federation.contacts,
            self.federation.groups(),
            keys.secret,
            listen or listening_address(site.address),
            record,
        )
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="cgd-file-hub", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """Stop the hub; a second call does nothing."""
        self._stop.set()
        self._watcher.join()
        self.hub.close()

    def _watch(self) -> None:
        """Reload the federation file when it changes."""
        for _ in watch(self.path, self._stop, WATCH_SECONDS):
            try:
                self._adopt(Federation.load(self.path))
            except CGDError as error:  # the thread must survive any error, to read the next version
                log.warning("the changed federation file is not used: %s", error, extra={"event": "file"})

    def _adopt(self, new: Federation) -> None:
        before = self.federation
        if new.digest == before.digest:
            return
        if new.name != before.name or new.epoch <= before.epoch:
            raise InputError(
                f"it is {new.name!r}, epoch {new.epoch}, and the hub runs {before.name!r}, epoch {before.epoch}; "
                "increase its epoch, or restart the hub"
            )
        if new.hub != before.hub:
            raise InputError("its [hub] has changed; restart the hub if that is intended")
        self.federation = new
        self.hub.update(new.contacts, new.groups())
        names = ", ".join(new.names)
        log.info("epoch %d: %s", new.epoch, names, extra={"event": "epoch", "epoch": new.epoch})
