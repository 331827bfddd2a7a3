"""What all tests share."""

import sys

from absl import logging as absl_logging

# rouge-score brings absl, whose log handler closes the stream it was made with when Hydra sets up logging anew;
# made in a test run, that stream is pytest's own capture. The process's stderr it leaves alone.
absl_logging.get_absl_handler().python_handler.stream = sys.__stderr__
