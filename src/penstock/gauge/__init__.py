"""Gauge: what the machines and the lines at hand reach, measured."""
