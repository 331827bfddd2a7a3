#!/usr/bin/env bash
# Makes the environment if needed, then checks style and types and runs the tests. Arguments go to pytest.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

bash scripts/setup.sh
runtime_settings
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} WANDB_MODE=${WANDB_MODE:-offline}

"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
"$venv/bin/mypy"
# Two workers of one thread each: tiny models gain nothing from a second thread, and the suite halves.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$venv/bin/python" -m pytest -n "${DEEPSPEC_TEST_WORKERS:-2}" --dist loadfile "$@"
