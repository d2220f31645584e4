"""A run folder: its checkpoints, its figures, its backbone."""
