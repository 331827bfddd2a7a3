#!/usr/bin/env bash
# From a fresh clone to a measured speedup: installs what is needed, then trains and measures a draft head on a
# real small model. Interrupted at any moment, the same command continues. Arguments go to the recipe; other
# settings belong into another folder:
#
#   bash scripts/quickstart.sh train.epochs=4 out=runs/longer

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

cat <<'TEXT'
deepspec quickstart: an EAGLE-3 draft head for SmolLM2-135M-Instruct, trained and measured on this machine.

  1. install     a virtual environment in .venv                 (skipped when done)
  2. prepare     the target model, prompts, answers of the target
  3. train       the draft head
  4. evaluate    plain against speculative decoding, and a report

About 15 minutes on 2 CPU cores, installation included. Ctrl-C is safe: the same command continues.

TEXT

bash scripts/setup.sh
runtime_settings
exec "$venv/bin/python" -m deepspec.pipeline +recipe=quickstart "$@"
