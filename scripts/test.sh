#!/usr/bin/env bash
# Makes the environment if needed, then checks style and types and runs the tests. Arguments go to pytest.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

bash scripts/setup.sh
runtime_settings
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} WANDB_MODE=${WANDB_MODE:-offline}

"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
"$venv/bin/mypy"
exec "$venv/bin/python" -m pytest "$@"
