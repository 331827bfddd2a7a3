"""`python -m deepspec.serve +recipe=X`: try a draft from any OpenAI-compatible client."""

if __name__ == "__main__":
    from deepspec.config.app import start

    start("serve")  # before the imports below, which take seconds

import sys
from importlib.util import find_spec

from deepspec.config.ranges import check
from deepspec.config.schema import Config
from deepspec.errors import UserError
from deepspec.pair import find_draft, load_pair

NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def run(config: Config) -> None:
    """Serve the run's target with its draft (`serve.plain`: without) until SIGTERM or Ctrl-C.

    `UserError`, before anything is loaded, for an address that is taken, a key that is none, and missing packages.
    """
    check(config)
    check_installed()
    from deepspec.serving.server import (
        KEY,
        bound_socket,
        is_local,
        key_from_environment,
        new_service,
        serve_until_told,
    )

    key = key_from_environment()
    found = find_draft(config)
    with bound_socket(config.serve.host, config.serve.port, "serve") as bound:
        pair = load_pair(config, found)
        if key is None and not is_local(config.serve.host):
            pair.warnings.append(
                f"everybody who reaches {config.serve.host} can use this server: set a key in {KEY}."
            )
        for warning in pair.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        service = new_service(config, pair.target, None if config.serve.plain else pair.draft, key)
        host, port = bound.getsockname()[:2]
        how = "plainly" if config.serve.plain else f"with {type(pair.draft).__name__}"
        where = f"[{host}]" if ":" in host else host
        print(
            f"serving {pair.target.name} {how} as {service.translator.name!r}\n"
            f"url       http://{where}:{port}/v1   (health: /health, numbers: /metrics; Ctrl-C ends it)",
            flush=True,
        )
        serve_until_told(service, bound, config.serve.grace)
        print("stopped", flush=True)


def check_installed() -> None:
    """`UserError` if the server's packages are missing."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UserError(
            f"The server needs {', '.join(missing)}, which this environment has not: pip install {' '.join(missing)}"
        )
