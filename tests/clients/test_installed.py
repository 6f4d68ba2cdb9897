"""Every client is there: a missing one fails by name, and is not left out in silence."""

import pytest

from tests.clients.conftest import FOLDER, missing

pytestmark = pytest.mark.clients

CLIENTS = sorted(file.stem.removeprefix("test_") for file in FOLDER.glob("test_*.py"))
CLIENTS.remove("installed")


@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_is_installed(client):
    reason = missing(client)
    assert reason is None, f"{client}: {reason}; `pip install '.[test,clients]'` has all clients"
