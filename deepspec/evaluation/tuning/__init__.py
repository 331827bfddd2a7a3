"""The fastest way to decode with a draft here: from what an evaluation recorded to settings that were tried."""
