"""Training of drafts: batches, the loop on accelerate, checkpoints, trackers."""
