"""State: what a rank holds of its stages: weights, gradients, versions, what an optimizer keeps."""
