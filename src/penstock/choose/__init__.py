"""Choose: from a job and its machines to the plan to train by."""
