"""How far away a server is: TCP and TLS connects, and the smallest request there is."""

import socket
import time
import urllib.request

import httpx
import numpy as np

from deepspec.errors import UserError
from deepspec.evaluation.metric import Metric
from deepspec.evaluation.statistics import Bootstrap, null

SAMPLES = 20
RESAMPLES = 2000
PORTS = {"http": 80, "https": 443}
PROXIED = "requests go through a proxy"


def median(seconds: list[float]) -> Metric:
    """With its interval over the samples."""
    values = np.array(seconds, dtype=np.float64)
    return Bootstrap(len(values), RESAMPLES).percentile(values, 50)


def connect_times(url: str, timeout: float, count: int = SAMPLES) -> tuple[Metric, Metric]:
    """(TCP, TLS): medians over `count` connections, made and closed. The name is looked up once, before.

    `UserError` where the server cannot be reached; null behind a proxy, whose distance would be measured instead.
    """
    parsed = httpx.URL(url)
    if proxied(parsed):
        return null(PROXIED), null(PROXIED)
    port = parsed.port or PORTS[parsed.scheme]
    context = httpx.create_ssl_context() if parsed.scheme == "https" else None
    tcp, tls = [], []
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(parsed.host, port, type=socket.SOCK_STREAM)[0]
        for _ in range(count):
            with socket.socket(family, kind, protocol) as plain:
                plain.settimeout(timeout)
                begun = time.perf_counter()
                plain.connect(place)
                tcp.append(time.perf_counter() - begun)
                if context is not None:
                    begun = time.perf_counter()
                    with context.wrap_socket(plain, server_hostname=parsed.host):
                        tls.append(time.perf_counter() - begun)
    except OSError as error:
        raise UserError(unreachable(url, error)) from error
    return median(tcp), median(tls) if tls else null("no TLS: the URL begins with http://")


def unreachable(url: str, error: Exception) -> str:
    """The sentence."""
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"{url} cannot be reached ({why}). Is the server running, and the address right?"


def proxied(url: httpx.URL) -> bool:
    """Whether the environment names a proxy for this address."""
    proxies = urllib.request.getproxies()
    return bool(proxies.get(url.scheme) or proxies.get("all")) and not urllib.request.proxy_bypass(url.host)
