"""What a run will take, before anything runs: rows, bytes, memory and seconds, and the knob where it does not fit."""
