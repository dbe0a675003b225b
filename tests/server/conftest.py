"""One server for many short tests of refusals, which start nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.server.serving import Client, reply, scripted, serving


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    """A client of a server that a module shares; its tests need ``asyncio(loop_scope="module")``."""
    model = scripted(tmp_path_factory.mktemp("shared"), [reply("", ["fine"])], tool_format="hermes")
    async with serving(model) as api:
        yield api
