"""Scripts as people write them, run by three plans each against the plain loop."""
