"""Pilot: what decides, while a run goes on, how it goes on."""
