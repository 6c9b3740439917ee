"""What a run leaves in its folder: checkpoints, events, metrics, settings, and their proof."""
