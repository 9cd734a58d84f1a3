"""Flags: the help of flags that several commands have; nothing that takes time to load."""

OFFLOAD = (
    "Keep in far memory what is not needed: state, activations, both, weights (with state), all."
)
SCHEDULE = "A name from `penstock schedule`, or a file: its text, JSON, or torch's CSV."
UNITS = "One unit for each block, or N for each stage."
MEMORY = "The most that a rank may hold: 60MiB, or 60MiB,30MiB one by one; default: all."
TENSOR = "Ranks that divide the ops of each stage."
