"""Layers: a chain of layers as stages on any devices, ours and as published planners would."""
