"""Checks a live server: whether it answers, has the plugin in this version, and can be updated now."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import httpx

from sglang_reshard.cli.doctor.finding import Finding, fail, ok, warning
from sglang_reshard.errors import Mismatch
from sglang_reshard.protocol.server_client import client, headers
from sglang_reshard.version import VERSION_KEY, check_same_protocol

_TIMEOUT_S = 20.0
_AUTH = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


def check_server(url: str, api_key: str = "", admin_api_key: str = "") -> list[Finding]:
    """Findings about the server at `url` (http://host:port). Stops at the first failure that makes the rest moot.

    api_key, admin_api_key  as in `RemoteEngine`: where a server has one key only, either will do
    """
    url = url.rstrip("/")
    serving, control = headers(api_key, admin_api_key)
    with client(_TIMEOUT_S) as http:
        try:
            answer = http.get(f"{url}/server_info", headers=serving)
        except httpx.InvalidURL as error:
            return fail("server", f"{url} is not a URL: {error}", "give it as http://host:port")
        except httpx.HTTPError as error:
            return fail(
                "server",
                f"{url} did not answer: {type(error).__name__}: {error}",
                "is it up, and on that port? Start it with --host 0.0.0.0 to be reached from other machines",
            )
        if answer.status_code in _AUTH:
            return fail(
                "server", f"{url} refuses the key ({answer.status_code})", "pass the server's own with --api-key"
            )
        told = _json(answer)
        if answer.status_code != HTTPStatus.OK or told is None:
            said = f"{url} answered {answer.status_code} {answer.text[:100]!r} to GET /server_info"
            return fail("server", said, "is an SGLang server at that address?")
        found = ok("server", f"SGLang {told.get('version', '(of no known version)')} at {url}")
        plugin = _plugin(told)
        return found + plugin + (_weights(http, url, control) if plugin[0].status == "ok" else [])


def _plugin(told: dict[str, Any]) -> list[Finding]:
    states = told.get("internal_states") or []
    versions = [str(state.get(VERSION_KEY, "")) for state in states]
    if not versions or not all(versions):
        return fail(
            "server's plugin",
            "its schedulers do not carry sglang-reshard",
            "install sglang-reshard with SGLang there and restart it; see 'Failed to load plugin' in its log, and "
            "SGLANG_PLUGINS in its environment",
        )
    if len(found := sorted(set(versions))) > 1 or " without " in found[0]:
        return fail(
            "server's plugin",
            f"its schedulers have sglang-reshard {', '.join(found)}",
            "install the same version on every node of the server, and an SGLang of the range that it supports",
        )
    return ok("server's plugin", f"sglang-reshard {found[0]} in all of {len(versions)} schedulers that answered")


def _weights(http: httpx.Client, url: str, control: dict[str, str]) -> list[Finding]:
    name = "server's weights"
    try:
        answer = http.get(f"{url}/weights_info", headers=control)
    except httpx.HTTPError as error:
        return fail(name, f"GET /weights_info: {type(error).__name__}: {error}", "look at the server's log")
    told = _json(answer)
    if answer.status_code in _AUTH:
        return fail(
            name, f"GET /weights_info needs the admin key ({answer.status_code})", "pass it with --admin-api-key"
        )
    if answer.status_code != HTTPStatus.OK or told is None:
        return warning(
            name, f"GET /weights_info answered {answer.status_code}", "look at the server's log for the plugin"
        )
    try:
        check_same_protocol(
            int(told.get("protocol", 0)), str(told.get("package_version", "")), theirs="the server", ours="this process"
        )
    except (Mismatch, TypeError, ValueError) as error:
        return fail(name, str(error), "install a release with the same protocol on the older side")
    if why := told.get("torn"):
        return fail(name, f"torn: {why}", "repeat the update; the server refuses requests until one succeeds")
    return ok(
        name, f"version {told.get('version', '')!s}, intact" + (", an update is running" * bool(told.get("under_way")))
    )


def _json(answer: httpx.Response) -> dict[str, Any] | None:
    try:
        told = answer.json()
    except ValueError:
        return None
    return told if isinstance(told, dict) else None
