"""deepspec: learn a draft model for a language model, and measure how much faster it decodes."""

import os

__version__ = "0.1.0"

# Before anything imports torch: threads that wait for each other must sleep, not spin. With another program on
# the same cores, spinning makes a two-thread forward up to 70 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Progress bars are the stages' own; those of the libraries below would run over them.
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
