"""Other projects' checkpoint formats, in and out. Nothing outside this room knows their tensor names."""
