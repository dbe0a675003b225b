"""What the handlers find in the application."""

from __future__ import annotations

from aiohttp import web

from mlxserve.server.registry import ModelRegistry

REGISTRY = web.AppKey("REGISTRY", ModelRegistry)
HAS_API_KEY = web.AppKey("HAS_API_KEY", bool)
PING_S = web.AppKey("PING_S", float)
