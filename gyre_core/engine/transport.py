"""httpx requests over aiohttp's connections.

Enters: httpx requests with bodies in memory. Leaves: httpx responses, read whole. httpcore's pool looks at every
connection before and after each request, which made half of what the proxy costs with 64 calls at once (measured).
"""

import aiohttp
import httpx


class AiohttpTransport(httpx.AsyncBaseTransport):
    """For `httpx.AsyncClient(transport=...)`: any number of connections, none older than `keepalive_s` when reused.

    Belongs to the event loop of its first request.
    """

    def __init__(self, *, keepalive_s: float) -> None:
        self._keepalive_s = keepalive_s
        self._session: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; failures are httpx's errors."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keepalive_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,  # httpx does it
            )
        limits = request.extensions.get("timeout", {})
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=limits.get("connect"), sock_read=limits.get("read"), connect=limits.get("pool")
        )
        try:
            async with self._session.request(
                request.method,
                str(request.url),
                data=await request.aread() or None,
                headers=request.headers.multi_items(),
                skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
                allow_redirects=False,
                timeout=timeout,
            ) as reply:
                content = await reply.read()
                return httpx.Response(reply.status, headers=reply.raw_headers, stream=httpx.ByteStream(content))
        except aiohttp.ConnectionTimeoutError as error:
            raise httpx.ConnectTimeout(str(error), request=request) from error
        except TimeoutError as error:
            raise httpx.ReadTimeout(str(error), request=request) from error
        except aiohttp.ClientConnectorError as error:
            raise httpx.ConnectError(str(error), request=request) from error
        except (aiohttp.ClientError, OSError) as error:
            raise httpx.ReadError(f"{type(error).__name__}: {error}", request=request) from error

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None
