"""`python -m deepspec.serve_features +recipe=X`: run the target for trainers on other machines."""

if __name__ == "__main__":
    from deepspec.config.app import start

    start("serve_features")  # before the imports below, which take seconds

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from deepspec.artifacts import MANIFEST
from deepspec.config.ranges import check
from deepspec.config.schema import Config, TargetConfig
from deepspec.serve import check_installed
from deepspec.target import Target, load_edges, load_target
from deepspec.target.fit import same_dtype

if TYPE_CHECKING:
    from deepspec.serving.engine import EngineTarget


def run(config: Config) -> None:
    """Answer questions for features until SIGTERM or Ctrl-C; nothing is written.

    `UserError`, before anything is loaded, for an address that is taken, a key that is none, and missing packages.
    """
    check(config)
    check_installed()
    from deepspec.serving.features import FeatureService, build_feature_app
    from deepspec.serving.server import KEY, bound_socket, is_local, key_from_environment, run_app

    settings, key = config.feature_server, key_from_environment()
    with bound_socket(settings.host, settings.port, "feature_server") as bound:
        target = _target(config)
        if key is None and not is_local(settings.host):
            print(
                f"warning: everybody who reaches {settings.host} can use this server: set a key in {KEY}.",
                file=sys.stderr,
            )
        service = FeatureService(target, settings.queue, settings.max_body, settings.max_tokens, key)
        host, port = bound.getsockname()[:2]
        where = f"[{host}]" if ":" in host else host
        dtype = str(target.identity()["dtype"])
        print(
            f"features of {target.name} ({dtype}, {target.num_layers} layers)\n"
            f"url       http://{where}:{port}/v1   (train with features.source=server "
            f"'features.servers=[http://{where}:{port}/v1]' target.dtype={dtype}; Ctrl-C ends it)",
            flush=True,
        )
        run_app(build_feature_app(service), bound, settings.grace, service.stop)
        print("stopped", flush=True)


def _target(config: Config) -> "Target | EngineTarget":
    settings, engine = _as_the_data(config), config.feature_server.engine
    if engine is None:
        target = load_target(settings)
        target.require("features")
        return target
    from deepspec.planning.sizes import draft_sizes
    from deepspec.serving.engine import EngineTarget

    edges = load_edges(settings)
    edges.release_layers()
    layers = draft_sizes(config.draft, edges).capture_layers
    return EngineTarget(edges, engine, layers, settings.path)


def _as_the_data(config: Config) -> TargetConfig:
    """With dtype=auto, the number format of the run's data, where they are here."""
    try:
        manifest = json.loads((Path(config.out) / "data" / MANIFEST).read_text(encoding="utf-8"))
        return same_dtype(config.target, manifest["inputs"]["target"])
    except (OSError, ValueError, KeyError, TypeError):
        return config.target
