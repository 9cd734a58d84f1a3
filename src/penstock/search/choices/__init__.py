"""Choices: one decision at a time: what to shard, who gets how much, hybrid or not, who is near."""
