"""Reports: one self-contained HTML page from a result file."""
