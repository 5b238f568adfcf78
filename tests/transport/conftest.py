from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.transports import ZeroMQNetwork

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def network() -> Iterator[ZeroMQNetwork]:
    """The keys and addresses of participants a, b and c; the transports that a test opens are closed after it."""
    created = ZeroMQNetwork()
    yield created
    created.close()
