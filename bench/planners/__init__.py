"""How published planners choose stages and devices, and the best plans of that kind there are."""
