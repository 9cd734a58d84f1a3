"""The fleet: hours and dollars of training on machines that come and go."""
