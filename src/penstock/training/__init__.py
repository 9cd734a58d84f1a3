"""Training: the main job's own room: what a job is examined for, and its proof."""
